#!/usr/bin/env bash
# poor_machine.sh DIR PYTHON HEAD: a Ray node of the cluster at HEAD, on a "machine" of its own (network, mounts,
# processes, host name `poor`) where much is wrong: its firewall lets in only what Ray connects to, its /dev/shm has
# 4 MiB, and the folders where kernels would be kept are files. Run it as the first process of
#     unshare --net --mount --pid --uts --fork --kill-child --mount-proc
# and all of it is gone once that is killed. A line on stdin says that its cable is plugged in: `cable`, whose other end
# has 10.79.0.1.
set -euo pipefail
dir=$1 python=$2 head=$3
read -r
hostname poor
mount -t tmpfs -o size=4M tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp/ray  # nodes that start at the same time would take the same names for their sockets
ip link set lo up
ip address add 10.79.0.2/24 dev cable
ip link set cable up
ip route add default via 10.79.0.1
nft add table inet raykv
nft add chain inet raykv in '{ type filter hook input priority 0; }'
nft add rule inet raykv in iifname cable ct state new tcp dport != 7000-7099 reject with tcp reset
mkdir "$dir/tmp"
touch "$dir/cache" "$dir/tmp/raykv-kernels-$(id -u)"
export NUMBA_CACHE_DIR=$dir/cache TMPDIR=$dir/tmp RAY_TMPDIR=/tmp
exec "$python" -m ray.scripts.scripts start --block --address="$head" --node-ip-address=10.79.0.2 --num-cpus=1 \
  --object-store-memory=80000000 --plasma-directory="$dir/tmp" --node-manager-port=7000 --object-manager-port=7001 \
  --min-worker-port=7010 --max-worker-port=7099
