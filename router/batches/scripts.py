"""What Redis does at once for the batches of a deployment. `redis_batches` says what is kept, and where.

KEYS[1] the sums of bytes, KEYS[2] when things end, KEYS[3] the batches to be worked on. ARGV[1] the deployment's name,
then what each script names. Times are Redis's own, in ms: of all who ask, no clock is read.
"""

_SHARED = """
local name = ARGV[1]
local plural = {file = 'files', batch = 'batches'}
local function key(kind, tenant, id)
    return name .. ':offline:' .. kind .. ':' .. tenant .. (id and ':' .. id or '')
end
local function now()
    local t = redis.call('TIME')
    return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function count(tenant, size)
    for _, whose in ipairs({tenant, 'all'}) do
        if redis.call('HINCRBY', KEYS[1], whose, size) <= 0 then
            redis.call('HDEL', KEYS[1], whose)
        end
    end
end
local function is_full(tenant, size, of_tenant, of_all)
    for whose, most in pairs({[tenant] = of_tenant, all = of_all}) do
        if tonumber(redis.call('HGET', KEYS[1], whose) or 0) + size > tonumber(most) then
            return whose == 'all' and 'all' or 'tenant'
        end
    end
end
local function add(kind, tenant, id, size)
    redis.call('HINCRBY', key(kind, tenant, id), 'size', size)
    count(tenant, size)
end
local function drop(kind, tenant, id)
    local place = key(kind, tenant, id)
    count(tenant, -tonumber(redis.call('HGET', place, 'size') or 0))
    redis.call('DEL', place, key('data', tenant, id))
    redis.call('ZREM', key(plural[kind], tenant), id)
    redis.call('ZREM', KEYS[2], kind .. ':' .. tenant .. ':' .. id)
end
local function put_file(tenant, id, record, keep, entry)
    redis.call('HSET', key('file', tenant, id), 'record', record)
    redis.call('ZADD', key('files', tenant), now(), id)
    redis.call('ZADD', KEYS[2], now() + keep, 'file:' .. tenant .. ':' .. id)
    add('file', tenant, id, entry)
end
local function holds(tenant, id, token)
    return redis.call('HGET', key('batch', tenant, id), 'lease') == token
end
"""

# tenant, file, number, part, bytes of content, bytes that it counts, pending ms, bytes of a tenant, of all
PUT_PART = (
    _SHARED
    + """
local tenant, id = ARGV[2], ARGV[3]
local full = is_full(tenant, tonumber(ARGV[7]), ARGV[9], ARGV[10])
if full then
    return full
end
redis.call('HSET', key('data', tenant, id), ARGV[4], ARGV[5])
redis.call('HINCRBY', key('file', tenant, id), 'bytes', ARGV[6])
add('file', tenant, id, tonumber(ARGV[7]))
redis.call('ZADD', KEYS[2], now() + ARGV[8], 'file:' .. tenant .. ':' .. id)
return 'put'
"""
)

# tenant, file, record, keep ms, bytes of an entry, files of a tenant
PUT_FILE = (
    _SHARED
    + """
if redis.call('ZCARD', key('files', ARGV[2])) >= tonumber(ARGV[7]) then
    return 'many'
end
put_file(ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6]))
return 'put'
"""
)

# file or batch, tenant, id
DROP = (
    _SHARED
    + """
local is_there = redis.call('HEXISTS', key(ARGV[2], ARGV[3], ARGV[4]), 'record')
drop(ARGV[2], ARGV[3], ARGV[4])
return is_there
"""
)

# at most
SWEEP = (
    _SHARED
    + """
local ended = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now(), 'LIMIT', 0, ARGV[2])
for _, entry in ipairs(ended) do
    redis.call('ZREM', KEYS[2], entry)
    local kind, tenant, id = string.match(entry, '^(%l+):(%x+):(%x+)$')
    if kind then
        drop(kind, tenant, id)
    end
end
return #ended
"""
)

# tenant, batch, made, input file, keep ms of that, bytes of an entry, batches of a tenant, bytes of a tenant, of all
CREATE = (
    _SHARED
    + """
local tenant, id, file = ARGV[2], ARGV[3], ARGV[5]
if redis.call('HEXISTS', key('file', tenant, file), 'record') == 0 then
    return 'unknown'
end
if redis.call('ZCARD', key('batches', tenant)) >= tonumber(ARGV[8]) then
    return 'many'
end
local full = is_full(tenant, tonumber(ARGV[7]), ARGV[9], ARGV[10])
if full then
    return full
end
redis.call('HSET', key('batch', tenant, id), 'record', ARGV[4])
add('batch', tenant, id, tonumber(ARGV[7]))
redis.call('ZADD', key('batches', tenant), now(), id)
redis.call('ZADD', KEYS[3], now(), tenant .. ':' .. id)
redis.call('ZADD', KEYS[2], 'GT', now() + ARGV[6], 'file:' .. tenant .. ':' .. file)
return 'put'
"""
)

# tenant, batch, unix seconds
CANCEL = (
    _SHARED
    + """
if redis.call('ZSCORE', KEYS[3], ARGV[2] .. ':' .. ARGV[3]) then
    redis.call('HSETNX', key('batch', ARGV[2], ARGV[3]), 'cancel', ARGV[4])
    return 1
end
return 0
"""
)

# token, lease ms, tenants of whom the caller has one already
CLAIM = (
    _SHARED
    + """
local at = now()
local held = {}
for number = 4, #ARGV do
    held[ARGV[number]] = true
end
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', at, 'LIMIT', 0, 1000)) do
    local tenant, id = string.match(entry, '^(%x+):(%x+)$')
    if not tenant or redis.call('HEXISTS', key('batch', tenant, id), 'record') == 0 then
        redis.call('ZREM', KEYS[3], entry)
    elseif not held[tenant] then
        redis.call('HSET', key('batch', tenant, id), 'lease', ARGV[2])
        redis.call('ZADD', KEYS[3], at + ARGV[3], entry)
        return {tenant, id}
    end
end
return {}
"""
)

# tenant, batch, token, lease ms. Says whether it is to be cancelled, too.
RENEW = (
    _SHARED
    + """
if not holds(ARGV[2], ARGV[3], ARGV[4]) then
    return 'lost'
end
redis.call('ZADD', KEYS[3], now() + ARGV[5], ARGV[2] .. ':' .. ARGV[3])
return redis.call('HEXISTS', key('batch', ARGV[2], ARGV[3]), 'cancel') == 1 and 'cancel' or 'held'
"""
)

# tenant, batch, token
RELEASE = (
    _SHARED
    + """
if holds(ARGV[2], ARGV[3], ARGV[4]) then
    redis.call('HDEL', key('batch', ARGV[2], ARGV[3]), 'lease')
    redis.call('ZADD', KEYS[3], now(), ARGV[2] .. ':' .. ARGV[3])
end
"""
)

# tenant, batch, token, state
SET_STATE = (
    _SHARED
    + """
if not holds(ARGV[2], ARGV[3], ARGV[4]) then
    return 'lost'
end
redis.call('HSET', key('batch', ARGV[2], ARGV[3]), 'state', ARGV[5])
return 'put'
"""
)

# tenant, batch, token, its file, the other one of its two, line, value, bytes of content, bytes that it counts,
# completed or failed, bytes of a tenant, of all. A line has one answer, in one of the two files.
RECORD = (
    _SHARED
    + """
local tenant, file, line = ARGV[2], ARGV[5], ARGV[7]
if not holds(tenant, ARGV[3], ARGV[4]) then
    return 'lost'
end
for _, other in ipairs({file, ARGV[6]}) do
    if redis.call('HEXISTS', key('data', tenant, other), line) == 1 then
        return 'put'
    end
end
local full = is_full(tenant, tonumber(ARGV[10]), ARGV[12], ARGV[13])
if full then
    return full
end
redis.call('HSET', key('data', tenant, file), line, ARGV[8])
redis.call('HINCRBY', key('file', tenant, file), 'bytes', ARGV[9])
add('file', tenant, file, tonumber(ARGV[10]))
redis.call('HINCRBY', key('batch', tenant, ARGV[3]), ARGV[11], 1)
return 'put'
"""
)

# tenant, batch, token, state, keep ms, bytes of an entry, then each file that there is, and its record
FINISH = (
    _SHARED
    + """
local tenant, id = ARGV[2], ARGV[3]
if not holds(tenant, id, ARGV[4]) then
    return 'lost'
end
redis.call('HSET', key('batch', tenant, id), 'state', ARGV[5])
redis.call('HDEL', key('batch', tenant, id), 'lease')
redis.call('ZREM', KEYS[3], tenant .. ':' .. id)
redis.call('ZADD', KEYS[2], now() + ARGV[6], 'batch:' .. tenant .. ':' .. id)
for number = 8, #ARGV, 2 do
    put_file(tenant, ARGV[number], ARGV[number + 1], ARGV[6], tonumber(ARGV[7]))
end
return 'put'
"""
)
