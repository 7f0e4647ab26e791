# Sourced after _env.sh by recipes for several machines: checks the variables of a machine and sets
# TORCHRUN, the command that replaces "$PYTHON". Every machine gets the same values,
# except for NODE_RANK.
#
# NNODES                  machines of the run
# NODE_RANK               the number of this one, from 0
# MASTER_ADDR             address of machine 0, as the others see it
# MASTER_PORT             a free port there                       (default: 29500)
# NPROC_PER_NODE          processes here                          (default: GPUs, or else 1)
# SHUTDOWN_TIMEOUT        seconds for a save after a signal       (default: 150)
# GLOO_SOCKET_IFNAME      network interface                       (default: the way to MASTER_ADDR)

stageline_need() {
    [ -n "${!1:-}" ] || stageline_fail "$1 is not set. Set it to $2, by which the machines find" \
        "each other, and start this script once on each machine:" \
        "NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash $0"
}

stageline_need_number() {
    [[ "${!1}" =~ ^[0-9]+$ ]] && [ "${!1}" -ge "$2" ] && [ "${!1}" -le "$3" ] ||
        stageline_fail "$1=${!1} does not fit: a whole number from $2 to $3 is required. $4"
}

# Print the address of machine 0, as this machine resolves it.
stageline_first_address() { getent ahosts "$MASTER_ADDR" | awk 'NR == 1 { print $1 }'; }

# Print the interface to machine 0. Without it gloo takes the address of this machine's name,
# which /etc/hosts often gives as 127.0.1.1.
stageline_interface() {
    local address own
    command -v ip >/dev/null 2>&1 || return 0
    address="$(stageline_first_address)"
    [ -n "$address" ] || return 0
    own="$(ip -o addr show to "$address")"
    if [ -n "$own" ]; then
        awk 'NR == 1 { print $2 }' <<<"$own"
    else
        ip -o route get "$address" | sed -n 's/.* dev \([^ ]*\).*/\1/p'
    fi
}

stageline_need NNODES "the number of machines"
stageline_need NODE_RANK "the number of this machine, from 0"
stageline_need MASTER_ADDR "the address of machine 0"
: "${MASTER_PORT:=29500}"
: "${NPROC_PER_NODE:=$("$PYTHON" -c 'import torch; print(torch.accelerator.device_count() or 1)')}"
stageline_need_number NNODES 1 100000 "Set it to the number of machines."
stageline_need_number NODE_RANK 0 "$((NNODES - 1))" "With $NNODES machines they are 0 to $((NNODES - 1))."
stageline_need_number MASTER_PORT 1 65535 "Any port that is free on machine 0 will do."
stageline_need_number NPROC_PER_NODE 1 1000 "One process for each GPU of this machine is usual."

if [ -z "${GLOO_SOCKET_IFNAME:-}" ]; then
    GLOO_SOCKET_IFNAME="$(stageline_interface || true)"
    [ -n "$GLOO_SOCKET_IFNAME" ] && export GLOO_SOCKET_IFNAME || unset GLOO_SOCKET_IFNAME
fi
# the same as torchrun, without its messages
[ "$NPROC_PER_NODE" = 1 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# otherwise torch's warnings about lost connections precede the cause
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
stageline_say "machine $NODE_RANK of $NNODES, $NPROC_PER_NODE processes, machine 0 is" \
    "$MASTER_ADDR:$MASTER_PORT, gloo on ${GLOO_SOCKET_IFNAME:-the address of its own name}"

# The static rendezvous puts rank 0 on machine 0 and orders ranks by machine; it does not retry
# after a failure.
TORCHRUN=(
    "$PYTHON" -m torch.distributed.run
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC_PER_NODE"
    --rdzv-backend static --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
    --max-restarts 0
    # Slurm's early signal is passed on, and ranks that save are not killed after 30 s
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
    --shutdown-timeout "${SHUTDOWN_TIMEOUT:-150}"
)
