#!/bin/bash
# Hosts on one machine, for `ray up`: each a network, pid, mount, ipc and uts namespace with an address, a user `ubuntu`,
# and a home, /etc, /tmp, /var, /run, /dev/shm and sshd of its own; /usr and /opt are this machine's, read-only.
#
#   hosts.sh up DIR NAME:IP ...   make them; their key is DIR/key, for ubuntu@IP
#   hosts.sh kill DIR NAME        as a power cut; `up` starts it again, with the files that it had
#   hosts.sh down DIR             kill all (each is one process tree, by the pid of its sshd), and remove DIR/hosts
#
# BIND=A:B    paths that every host sees, read-only. Needs root, openssh-server, rsync, iproute2.
set -euo pipefail
BRIDGE=xpydtest0 GATEWAY=10.78.0.1/24
verb=${1:?up|kill|down} dir=$(realpath -m "${2:?DIR}"); shift 2

cut_power() {  # only what still is that host: pids are used again
    local pid; pid=$(cat "$dir/hosts/$1/sshd.pid")
    [ "$(readlink "/proc/$pid/root" 2>/dev/null)" = "$dir/hosts/$1/root" ] && kill -9 "$pid"
}

make_host() {  # NAME IP, inside the new namespaces
    local name=$1 ip=$2 at=$dir/hosts/$1 root=$dir/hosts/$1/root shared late=(/usr /opt)
    mount --make-rprivate /
    mkdir -p "$root" "$at"/{etc,etc-work,home,tmp,var,run,root-home}
    chmod 1777 "$at/tmp"
    mount -t tmpfs -o size=16m,mode=755 none "$root"
    mkdir -p "$root"/{usr,opt,etc,home,tmp,var,run,root,proc,sys,dev}
    ln -s usr/bin usr/sbin usr/lib usr/lib64 "$root"
    late+=(${BIND//:/ })
    mount -t overlay -o "lowerdir=/etc,upperdir=$at/etc,workdir=$at/etc-work" none "$root/etc"
    for own in home tmp var run; do mount --bind "$at/$own" "$root/$own"; done
    mount --bind "$at/root-home" "$root/root"; chmod 711 "$at/root-home"
    mkdir -p "$root/var"/{tmp,log,lib,cache} "$root/run/sshd"
    for shared in "${late[@]}"; do
        mkdir -p "$root$shared"; mount --bind "$shared" "$root$shared"; mount -o remount,bind,ro "$root$shared"
    done
    mount -t proc proc "$root/proc"; mount -t sysfs sysfs "$root/sys" -o ro
    mount -t tmpfs -o mode=755,size=1m none "$root/dev"
    mkdir "$root"/dev/{pts,shm}; ln -s pts/ptmx "$root/dev/ptmx"; ln -s /proc/self/fd "$root/dev/fd"
    for device in null zero full random urandom tty; do
        touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"
    done
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
    mount -t tmpfs -o size=4g,mode=1777 shm "$root/dev/shm"
    hostname "$name"; ip link set lo up
    cat >"$root/setup" <<SETUP
set -e
export PATH=/usr/sbin:/usr/bin
printf '127.0.0.1 localhost\n%s %s\n' $ip $name >/etc/hosts; echo $name >/etc/hostname; : >/etc/resolv.conf
getent passwd ubuntu >/dev/null || useradd --password '*' --uid 1500 --user-group --create-home --shell /bin/bash ubuntu
install -d -m 700 -o ubuntu -g ubuntu /home/ubuntu/.ssh
install -m 600 -o ubuntu -g ubuntu /etc/test-key.pub /home/ubuntu/.ssh/authorized_keys
rm -f /etc/ssh/ssh_host_*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
printf 'ListenAddress $ip\nHostKey /etc/ssh/ssh_host_ed25519_key\nPasswordAuthentication no\nUsePAM no\nSubsystem sftp internal-sftp\nMaxStartups 100\nMaxSessions 100\n' >/etc/ssh/sshd_config
SETUP
    cp "$dir/key.pub" "$root/etc/test-key.pub"
    env -i LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin /usr/sbin/chroot "$root" /bin/bash /setup
    exec env -i LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin /usr/sbin/chroot "$root" /usr/sbin/sshd -D -e
}

case $verb in
up)
    mkdir -p "$dir/hosts"
    [ -f "$dir/key" ] || ssh-keygen -q -t ed25519 -N '' -f "$dir/key"
    ip link show $BRIDGE >/dev/null 2>&1 || { ip link add $BRIDGE type bridge; ip addr add $GATEWAY dev $BRIDGE; ip link set $BRIDGE up; }
    for host; do
        name=${host%%:*} address=${host##*:}; mkdir -p "$dir/hosts/$name"
        rm -f "$dir/hosts/$name/go"; mkfifo "$dir/hosts/$name/go"
        setsid unshare --fork --kill-child --pid --mount --net --ipc --uts "$0" _inside "$dir" "$name" "$address" \
            >"$dir/hosts/$name/sshd.log" 2>&1 </dev/null &
        outer=$!
        for _ in {1..100}; do inner=$(tr -d ' ' <"/proc/$outer/task/$outer/children" 2>/dev/null) && [ -n "$inner" ] && break; sleep .05; done
        echo "$inner" >"$dir/hosts/$name/sshd.pid"
        ip link del "x-$name" 2>/dev/null || true
        ip link add "x-$name" type veth peer name eth0 netns "$inner"
        ip link set "x-$name" master $BRIDGE up
        nsenter -t "$inner" -n sh -c "ip addr add $address/24 dev eth0 && ip link set eth0 up"
        echo go >"$dir/hosts/$name/go"
    done
    for host; do
        for _ in {1..200}; do grep -qs listening "$dir/hosts/${host%%:*}/sshd.log" && continue 2; sleep .1; done
        cat "$dir/hosts/${host%%:*}/sshd.log" >&2; exit 1
    done ;;
_inside) read -r _ <"$dir/hosts/$1/go"; make_host "$@" ;;
kill) cut_power "$1" ;;
down)
    for at in "$dir"/hosts/*/; do cut_power "$(basename "$at")" || true; done
    sleep 1
    for at in "$dir"/hosts/*/; do ip link del "x-$(basename "$at")" 2>/dev/null || true; done
    ip link del $BRIDGE 2>/dev/null || true
    rm -rf --one-file-system "$dir/hosts" ;;
esac
