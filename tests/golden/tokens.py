"""Records of tokens and log-probabilities: the engine alone, and prefill -> transfer -> decode in one process.

Cases that must agree form a group: they answer the same requests. A group's answers are recorded once. `check` compares
every case with the first one of its group on any machine, and with the record where processor and weights are those of
the record. Requests run one at a time, so that no step depends on what else arrives.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.golden import product
from tests.golden.product import Role, Sampling

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
EXACT, ROUNDED = 2e-4, 0.03  # tolerance of a logprob: float32 throughout; bfloat16, or 8 bits on the wire

_GREEDY = Sampling(max_tokens=16, temperature=0.0)
_SEEDED = Sampling(max_tokens=16, temperature=0.8, top_p=0.9, top_k=50, seed=7, num_logprobs=2)


@dataclass(frozen=True)
class Request:
    name: str
    prompt: list[int]
    sampling: Sampling
    n: int = 1
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Group:
    """Requests whose answers must be equal in every case."""

    name: str
    model: Callable[[Path], Path]
    requests: Callable[[Path], list[Request]]
    within: float = EXACT
    cases: dict[str, Callable[[Setting], list[dict[str, str]]]] = field(default_factory=dict)
    quick: tuple[str, ...] = ()  # cases that the default test suite runs


@dataclass(frozen=True)
class Setting:
    """Environment of one group on this machine."""

    directory: Path  # parent of all models
    model_dir: Path
    requests: list[Request]
    redis_url: str


def processor() -> str:
    """Return the processor's kind, as far as it affects results."""
    path = Path("/proc/cpuinfo")
    words = set(path.read_text().split()) if path.exists() else set()
    found = [flag for flag in _FLAGS if flag in words]
    compiler = "c++" if shutil.which("c++") or shutil.which("g++") else "no c++"
    return " ".join([platform.machine(), *found, compiler])


def weights_of(model_dir: Path) -> str:
    """Return a digest of the weights: random ones depend on the versions of torch and transformers."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted((*model_dir.glob("*.safetensors"), *model_dir.glob("*.gguf"))):
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    return digest.hexdigest()


def run(group: Group, directory: Path, redis_url: str, *, only_quick: bool = False) -> dict[str, Any]:
    """Return the answers of every case."""
    torch.set_num_threads(1)
    model_dir = group.model(directory)
    setting = Setting(directory, model_dir, group.requests(model_dir), redis_url)
    cases = {name: case for name, case in group.cases.items() if name in group.quick or not only_quick}
    return {"weights": weights_of(model_dir), "cases": {name: case(setting) for name, case in cases.items()}}


def differences(expected: list[dict[str, str]], found: list[dict[str, str]], *, within: float) -> list[str]:
    """Return lines that describe the first difference of each request."""
    wrong = [] if len(expected) == len(found) else [f"{len(found)} answers, expected {len(expected)}"]
    for old, new in zip(expected, found, strict=False):
        for key in sorted((old.keys() | new.keys()) - {"request"}):
            olds, news = old.get(key, "").split(), new.get(key, "").split()
            at = next((i for i, pair in enumerate(zip(olds, news, strict=False)) if not _same(*pair, within)), None)
            if at is not None:
                wrong.append(f"{old['request']}: {key}[{at}]: expected {olds[at]}, found {news[at]}")
            elif len(olds) != len(news):
                wrong.append(f"{old['request']}: {key}: expected {len(olds)} values, found {len(news)}")
    return wrong


def _same(old: str, new: str, within: float) -> bool:
    """Compare words: token ids, ids with a logprob after a colon, or logprobs."""
    old_id, _, old_value = old.rpartition(":")
    new_id, _, new_value = new.rpartition(":")
    if "." not in old_value:
        return old == new
    return old_id == new_id and abs(float(old_value) - float(new_value)) <= within


# Cases.


def engine(**config: Any) -> Callable[[Setting], list[dict[str, str]]]:
    """Case of the engine alone, one rank."""

    def case(setting: Setting) -> list[dict[str, str]]:
        runner = product.ModelRunner(
            product.EngineConfig(model_dir=setting.model_dir, kv_memory_gib=0.1, **({"dtype": "float32"} | config))
        )
        answers = []
        for request in setting.requests:
            [tokens] = product.generate(runner, [request.prompt], request.sampling)
            answers.append(_answer(request, {0: tokens}))
        return answers

    return case


def cluster(
    path: str = "shipped",
    tp: tuple[int, int] = (1, 1),
    *,
    link: str = "tcp",
    dtype: str = "float32",
    weights: str = "auto",
    method: str = "off",
    gib: float = 0.02,
    **kv: Any,
) -> Callable[[Setting], list[dict[str, str]]]:
    """path: `shipped` from a prefill replica, `local` on the decode replica, `local_decode` on the prefill replica.

    With a speculation method, ranks have processes of their own and draft before every step; requests are sent twice,
    so that earlier answers can be drafted from.
    """

    def case(setting: Setting) -> list[dict[str, str]]:
        kv_spec = {"host_link": link, "wire_dtype": "raw"} | kv
        exact = (
            dtype == "bfloat16" and (kv_spec["wire_dtype"] == "raw" or "pool_dtype" in kv_spec) and tp[0] == tp[1] < 3
        )
        tree: dict[str, Any] = {
            "model": {"dtype": dtype, "weights": weights},
            "kv": kv_spec,
            "engine": {"deterministic": exact},
            "prefill": {"tensor_parallel": tp[0], "kv_memory_gib": gib, "replicas": path != "local"},
            "decode": {"tensor_parallel": tp[1], "kv_memory_gib": gib, "replicas": path != "prefill"},
            "router": {"max_local_prefill": 0},
        }
        if path == "prefill":
            tree["prefill"] |= {"answer_share": 0.9, "answer_overflow": True}
        if method != "off":
            tree["speculation"] = {
                "method": method.removesuffix("1"),
                "max_tokens": 4,
                "model": _drafts(setting, method),
            }
        return asyncio.run(_ask(setting, tree, path, is_drafting=method != "off"))

    return case


async def _ask(setting: Setting, tree: dict[str, Any], path: str, *, is_drafting: bool) -> list[dict[str, str]]:
    starting = dict.fromkeys(Role, 0)
    if is_drafting:
        for role in Role:
            starting[role] = int(tree[role.value].get("replicas", 1))
            tree[role.value]["replicas"] = 0
    async with product.local_cluster(setting.model_dir, setting.redis_url, processes=is_drafting, **tree) as local:
        for role, number in starting.items():
            for _ in range(number):
                await local.add(role, prepare=product.draft_always)
        answers, drafted = [], 0
        for request in setting.requests * (1 + is_drafting):
            answer = await local.generate(
                request.prompt,
                request.sampling,
                id=request.name,
                n=request.n,
                num_prompt_logprobs=request.num_prompt_logprobs,
            )
            route = answer.route
            drafted += route.drafts.drafted
            taken = (
                "prefill"
                if route.decode_replica.startswith("prefill")
                else "shipped"
                if route.prefill_replica
                else "local"
            )
            assert taken == path, f"{request.name}: path {taken}, expected {path}: {route}"
            answers.append(_answer(request, answer.tokens, answer.prompt_logprobs))
        assert drafted or not is_drafting, "nothing was drafted"
        await local.idle()
    return answers[-len(setting.requests) :]


def _answer(request: Request, tokens: dict[int, Any], prompt_logprobs: Any = None) -> dict[str, str]:
    answer = {"request": request.name, "prompt": " ".join(map(str, request.prompt))}
    for choice, some in sorted(tokens.items()):
        of = "" if request.n == 1 else f" of choice {choice}"
        answer[f"tokens{of}"] = " ".join(str(token.token_id) for token in some)
        answer[f"end{of}"] = str(some[-1].finish_reason)
        if some[0].logprob:
            answer[f"logprobs{of}"] = " ".join(f"{token.logprob.logprob:.5f}" for token in some)
            answer[f"top{of}"] = " ".join(f"{id}:{value:.5f}" for token in some for id, value in token.logprob.top)
    if prompt_logprobs is not None:
        answer["prompt logprobs"] = " ".join(f"{value:.5f}" for value in prompt_logprobs.logprobs_P)
        answer["prompt ranks"] = " ".join(map(str, prompt_logprobs.ranks_P))
    return answer


# Models and requests.


@cache
def _made(directory: Path, family: str, changes: tuple[tuple[str, Any], ...]) -> Path:
    place = directory / f"{family}-{hashlib.blake2b(repr(changes).encode(), digest_size=4).hexdigest()}"
    if not place.exists():
        product.random_model(product.tiny_config(family, **dict(changes))).save_pretrained(place)
        _write_tokenizer(place)
    return place


def _write_tokenizer(place: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({f"<{i}>": i for i in range(product.VOCAB_SIZE)}))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(place / "tokenizer.json"))


def _tiny(family: str, **changes: Any) -> Callable[[Path], Path]:
    return lambda directory: _made(directory, family, tuple(sorted(changes.items())))


def _smollm2(_: Path) -> Path:
    return product.smollm2()


def _mtp(directory: Path) -> Path:
    place = directory / "mtp"
    if not place.exists():
        product.write_mtp(place)
        _write_tokenizer(place)
    return place


def _drafts(setting: Setting, method: str) -> str | None:
    """Return the draft model or heads of a method."""
    place = setting.directory / f"{method}-of-{setting.model_dir.name}"
    writes = {"medusa": product.write_medusa, "eagle": product.write_eagle, "eagle1": product.write_eagle1}
    if method in ("draft", "auto"):
        return str(product.first_layers(setting.model_dir, 2))
    if method in writes:
        if not place.exists():
            place.mkdir()
            writes[method](place)
        return str(place)
    return None


def _two_kinds(*lengths: int) -> Callable[[Path], list[Request]]:
    """Prompts of these lengths, greedy and seeded in turn."""
    kinds = {"greedy": _GREEDY, "seeded": _SEEDED}
    names = [list(kinds)[i % 2] for i in range(len(lengths))]
    return lambda _: [
        Request(f"{name} {len(prompt)}", prompt, kinds[name])
        for name, prompt in zip(names, product.prompts(*lengths), strict=True)
    ]


def _every_sampling(_: Path) -> list[Request]:
    rules = product.TokenRules(logit_bias=((5, 4.0), (6, -9.0)), bad_words=((5, 5), (7,)))
    allowed = product.TokenRules(allowed_token_ids=(3, 9, 27, 81))
    samplings = {
        "greedy with logprobs": {"temperature": 0.0, "num_logprobs": 3},
        "temperature": {"temperature": 1.0, "seed": 1},
        "top_p": {"temperature": 1.0, "top_p": 0.8, "seed": 2},
        "top_k": {"temperature": 1.0, "top_k": 5, "seed": 3},
        "min_p": {"temperature": 1.0, "min_p": 0.05, "seed": 4},
        "penalties": {"repetition_penalty": 1.3, "presence_penalty": 1.2, "frequency_penalty": 0.3, "seed": 5},
        "rules": {"token_rules": rules, "seed": 6, "num_logprobs": 1},
        "allowed": {"token_rules": allowed, "temperature": 0.0},
        "stops": {"min_tokens": 4, "stop_token_ids": tuple(range(0, product.VOCAB_SIZE, 4)), "seed": 7},
    }
    prompts = product.prompts(*range(20, 20 + len(samplings)))
    return [
        Request(name, prompt, Sampling(max_tokens=14, **sampling))
        for (name, sampling), prompt in zip(samplings.items(), prompts, strict=True)
    ]


def _choices(_: Path) -> list[Request]:
    long, short = product.prompts(37, 21)
    sampling = Sampling(max_tokens=10, temperature=1.0, seed=3, num_logprobs=0)
    return [
        Request("three choices", long, sampling, n=3),
        Request("logprobs of the prompt", short, sampling, num_prompt_logprobs=0),
    ]


def _questions(model_dir: Path) -> list[Request]:
    questions = ("What is the capital of France?", "Name three colours of the rainbow.")
    prompts = product.chat_prompts(model_dir, questions)
    stops = {"stop_token_ids": (2,)}  # <|im_end|>
    samplings = (
        Sampling(max_tokens=16, temperature=0.0, num_logprobs=2, **stops),
        Sampling(max_tokens=16, temperature=0.7, seed=11, num_logprobs=2, **stops),
    )
    return [Request(q, p, s) for q, p, s in zip(questions, prompts, samplings, strict=True)]


# Groups.

_MIXED = _two_kinds(5, 33, 70, 47)
_PAIRS = ((1, 1), (1, 2), (2, 1), (2, 2))


def _groups() -> list[Group]:
    return [*_llama(), *_families(), *_speculation(), *_smollm2_groups()]


def _llama() -> list[Group]:
    llama = _tiny("llama")
    links = ("tcp", "gloo")
    raw = {f"shipped {p}+{d} {link} raw": cluster(tp=(p, d), link=link) for p, d in _PAIRS for link in links}
    stays = {f"{path} tp {t}": cluster(path, (t, t)) for path in ("local", "prefill") for t in (1, 2)}
    groups = [
        Group("llama float32", llama, _MIXED, cases={"engine": engine(), **raw, **stays},
              quick=("engine", "shipped 1+1 tcp raw", "shipped 1+2 gloo raw", "local tp 1", "prefill tp 1")),
        Group("llama samplings", llama, _every_sampling, cases={"engine": engine(), "shipped 1+1 tcp raw": cluster()},
              quick=("engine",)),
        Group("llama choices", llama, _choices,
              cases={"shipped 1+1 tcp raw": cluster(), "local tp 1": cluster("local")}, quick=("local tp 1",)),
    ]  # fmt: skip
    for t in (1, 2):
        cases = {f"shipped {t}+{t} {link} raw": cluster(tp=(t, t), link=link, dtype="bfloat16") for link in links}
        cases |= {f"{path} tp {t}": cluster(path, (t, t), dtype="bfloat16") for path in ("local", "prefill")}
        if t == 1:
            cases = {"engine": engine(dtype="bfloat16", deterministic=True)} | cases
        quick = ("engine", "shipped 1+1 tcp raw") if t == 1 else ()
        groups.append(Group(f"llama bfloat16 tp {t}", llama, _MIXED, ROUNDED, cases, quick))
        for bits in ("fp8_e4m3", "int8"):
            wire = {
                f"shipped {t}+{t} {link}": cluster(tp=(t, t), link=link, dtype="bfloat16", wire_dtype=bits)
                for link in links
            }
            quick = ("shipped 1+1 tcp",) if (t, bits) == (1, "fp8_e4m3") else ()
            groups.append(Group(f"llama bfloat16 wire {bits} tp {t}", llama, _MIXED, ROUNDED, wire, quick))
    for bits in ("fp8_e4m3", "int8"):
        wire = {
            f"shipped {p}+{d} {link}": cluster(tp=(p, d), link=link, wire_dtype=bits)
            for p, d in _PAIRS
            for link in links
        }
        groups.append(Group(f"llama float32 wire {bits}", llama, _MIXED, EXACT, wire))
        pools = {
            "engine": engine(dtype="bfloat16", pool_dtype=bits, deterministic=True),
            "shipped 1+1 tcp": cluster(dtype="bfloat16", pool_dtype=bits),
        }
        groups.append(Group(f"llama bfloat16 pool {bits}", llama, _MIXED, ROUNDED, pools))
    return groups


def _families() -> list[Group]:
    """Each family in both dtypes; families with unusual KV are also shipped."""
    families: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": 24}, "qwen2": {}, "qwen3": {}, "mixtral": {}, "qwen2_moe": {}, "qwen3_moe": {},
        "deepseek_v2": product.DEEPSEEK_V2, "deepseek_v3": product.DEEPSEEK_V3,
    }  # fmt: skip
    groups = []
    for family, changes in families.items():
        model, requests = _tiny(family, **changes), _two_kinds(33, 70)
        shipped = {"shipped 2+1 tcp raw": cluster(tp=(2, 1))}
        cases = {"engine": engine()} | (shipped if family in ("mistral", "qwen3_moe", "deepseek_v3") else {})
        groups.append(Group(f"{family} float32", model, requests, EXACT, cases, quick=("engine",)))
        cases = {"engine": engine(dtype="bfloat16")}
        groups.append(Group(f"{family} bfloat16", model, requests, ROUNDED, cases))
    return groups


def _with_repeats(model_dir: Path) -> list[Request]:
    """Prompts of only three different tokens: their answers repeat, so that n-grams are found."""
    few = Sampling(max_tokens=24, seed=3, token_rules=product.TokenRules(allowed_token_ids=(5, 6, 7)))
    return [*_two_kinds(20, 33, 47, 18)(model_dir), Request("three tokens alone", product.prompts(25)[0], few)]


def _speculation() -> list[Group]:
    requests = _with_repeats
    methods = ("ngram", "suffix", "draft", "self", "medusa", "eagle", "eagle1", "auto")
    cases = {"engine, off": engine()} | {f"shipped 1+1, {one}": cluster(method=one) for one in methods}
    cases["shipped 2+2, suffix"] = cluster(tp=(2, 2), method="suffix")
    cases["shipped 2+2, eagle"] = cluster(tp=(2, 2), method="eagle")
    mtp = {"engine, off": engine(), "shipped 1+1, mtp": cluster(method="mtp")}
    return [
        Group("llama speculation", _tiny("llama"), requests, EXACT, cases),
        Group("deepseek_v3 speculation", _mtp, requests, EXACT, mtp),
    ]


def _smollm2_groups() -> list[Group]:
    one = {"gib": 0.1}
    wide: dict[str, Any] = {"dtype": "bfloat16", "weights": "widen"}
    stored_bits = {
        "engine": engine(dtype="bfloat16", deterministic=True),
        "shipped 1+1 tcp raw": cluster(dtype="bfloat16", **one),
        "local tp 1": cluster("local", dtype="bfloat16", **one),
    }
    float32 = {
        "engine": engine(),
        "shipped 1+1 tcp raw": cluster(**one),
        "shipped 1+3 gloo raw": cluster(tp=(1, 3), link="gloo", **one),
    }
    raw = {
        "engine": engine(deterministic=True, **wide),
        "shipped 1+1 tcp raw": cluster(**one, **wide),
        "local tp 1": cluster("local", **one, **wide),
        "prefill tp 1": cluster("prefill", **one, **wide),
    }
    fp8 = {f"shipped 1+1 {link}": cluster(link=link, wire_dtype="fp8_e4m3", **one, **wide) for link in ("tcp", "gloo")}
    suffix = {"shipped 1+1, suffix": cluster(method="suffix", **one), "engine, off": engine()}
    return [
        Group("smollm2 float32", _smollm2, _questions, EXACT, float32),
        Group("smollm2 bfloat16", _smollm2, _questions, ROUNDED, raw),
        Group("smollm2 bfloat16 stored bits", _smollm2, _questions, ROUNDED, stored_bits),
        Group("smollm2 bfloat16 wire fp8_e4m3", _smollm2, _questions, ROUNDED, fp8),
        Group("smollm2 speculation", _smollm2, _questions, EXACT, suffix),
    ]


GROUPS = {group.name: group for group in _groups()}


def to_text(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"
