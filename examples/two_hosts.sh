#!/usr/bin/env bash
# numden train on two hosts: network namespaces of this machine, joined by a virtual cable, one rank
# each. What it runs in them is what one runs on real hosts. Needs Linux, root, and iproute2.
#
#   sudo examples/two_hosts.sh --out runs/two_hosts --set target.num_windows=20
#
# Arguments go to `numden train`; what the first host says is printed.
set -euo pipefail

torchrun=${TORCHRUN:-$(dirname "$0")/../.venv/bin/torchrun}
tag=nd$$                         # namespaces of this run; two of them may go on at once
first=10.213.7.1 second=10.213.7.2

hosts=()                         # torchrun on each, which passes SIGTERM on to its rank

clean_up() {
    kill "${hosts[@]}" 2>/dev/null || true
    wait
    ip netns del "$tag-a" 2>/dev/null || true
    ip netns del "$tag-b" 2>/dev/null || true
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

ip netns add "$tag-a"
ip netns add "$tag-b"
ip link add veth0 netns "$tag-a" type veth peer name veth0 netns "$tag-b"
for host in "a $first" "b $second"; do
    ip -n "$tag-${host% *}" addr add "${host#* }/24" dev veth0
    ip -n "$tag-${host% *}" link set veth0 up
    ip -n "$tag-${host% *}" link set lo up
done

on_host() {                      # on_host NAMESPACE ADDRESS IS_FIRST ARGUMENTS...
    local namespace=$1 address=$2 is_first=$3
    shift 3
    GLOO_SOCKET_IFNAME=veth0 exec ip netns exec "$namespace" "$torchrun" \
        --nnodes 2 --nproc-per-node 1 --local-addr "$address" \
        --rdzv-backend c10d --rdzv-endpoint "$first:29500" --rdzv-id "$tag" \
        --rdzv-conf "is_host=$is_first" \
        -m numden train "$@"
}

on_host "$tag-b" "$second" 0 "$@" &
hosts+=($!)
on_host "$tag-a" "$first" 1 "$@" &
hosts+=($!)
for host in "${hosts[@]}"; do wait "$host"; done
