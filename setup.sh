#!/usr/bin/env bash
# ./setup.sh [cpu|gpu|tpu] makes this machine able to run MaxText: finds a Python, makes .venv, installs the lock into it.
# Run it as often as you like: a .venv that is right is left alone, any other is made anew.
# PYTHON=/path/to/python ./setup.sh chooses the Python. Exit code: 0 ready, 1 not installed, 2 wrong use or no Python.
set -euo pipefail
unset CDPATH PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_ROOT
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

fail() { # CODE SENTENCE
  printf 'setup.sh: %s\n' "$2" >&2
  exit "$1"
}

# What a Python says of itself: "ok 3.13.0 31300 /its/base/executable" or "no 3.9.2 too old". Written for any Python.
# The range is that of the wheels in the lock.
probe='
import os, sys
v = sys.version_info
why = ""
if v[:2] < (3, 11):
    why = "too old"
elif v[:2] > (3, 14):
    why = "newer than the lock"
elif sys.implementation.name != "cpython" or sys.maxsize < 2**32:
    why = "not a 64-bit CPython"
else:
    import sysconfig
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        why = "free-threaded"
    for module in ("ctypes", "ssl", "venv", "ensurepip"):
        try:
            __import__(module)
        except ImportError:
            why = "without the module " + module
version = "%d.%d.%d" % v[:3]
base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
print("no %s %s" % (version, why) if why else "ok %s %d %s" % (version, v[1] * 100 + v[2], base))
'
ask() { "$1" -E -c "$probe" </dev/null 2>/dev/null || true; }

# Where Pythons live: PATH, version managers, distributions. One path a line; each is asked before it is believed,
# since a version manager puts stubs on PATH that only print an error.
candidates() {
  local home=${HOME:-/nonexistent} folder name
  local share=${XDG_DATA_HOME:-$home/.local/share}
  for name in python3.14 python3.13 python3.12 python3.11 python3 python; do type -ap "$name" || true; done
  for folder in \
    "${PYENV_ROOT:-$home/.pyenv}"/versions/*/bin "${UV_PYTHON_INSTALL_DIR:-$share/uv/python}"/*/bin \
    "${ASDF_DATA_DIR:-$home/.asdf}"/installs/python/*/bin "${MISE_DATA_DIR:-$share/mise}"/installs/python/*/bin \
    "$home"/.rye/py/*/bin "$home"/{mini,ana}conda3/{,envs/*/}bin "$home"/{miniforge3,mambaforge}/{,envs/*/}bin \
    "${MAMBA_ROOT_PREFIX:-$home/micromamba}"/{,envs/*/}bin /opt/{mini,ana,}conda{,3}/{,envs/*/}bin \
    /opt/homebrew/bin /opt/homebrew/opt/python@3.*/bin /usr/local/opt/python@3.*/bin /home/linuxbrew/.linuxbrew/bin \
    /Library/Frameworks/Python.framework/Versions/3.*/bin /opt/python/*/bin /usr/local/bin /usr/bin; do
    for name in "$folder"/python3.1[1-4]; do
      if [ -x "$name" ]; then printf '%s\n' "$name"; fi
    done
  done
}

# Sets `python` (base executable) and `version` to the newest usable Python, or fails with one sentence.
find_python() {
  local best=0 candidate verdict number rest known=''
  while IFS= read -r candidate; do
    read -r verdict number rest <<<"$(ask "$candidate")"
    if [ "$verdict" = ok ] && [ "${rest%% *}" -gt "$best" ]; then
      best=${rest%% *} version=$number python=${rest#* }
    elif [ "$verdict" = no ] && [ "${#known}" -lt 200 ]; then
      known="$known${known:+, }$candidate ($number, $rest)"
    fi
  done < <(candidates | awk '!seen[$0]++')
  [ "$best" != 0 ] || fail 2 "no usable Python here: MaxText needs 3.11 to 3.14 with the module venv; found ${known:-none}. \
Install one (for example: apt install python3-venv, brew install python, uv python install 3.13) or name one: PYTHON=/path/to/python ./setup.sh"
}

# The same for the Python that the caller named.
take_python() {
  local found verdict rest
  found=$(command -v -- "$PYTHON") || fail 2 "PYTHON=$PYTHON is not a program; give the path of a Python 3.11 to 3.14."
  read -r verdict version rest <<<"$(ask "$found")"
  [ -n "$verdict" ] || fail 2 "PYTHON=$PYTHON does not run as a Python; give the path of a Python 3.11 to 3.14."
  [ "$verdict" = ok ] || fail 2 "PYTHON=$PYTHON is Python $version: $rest; MaxText needs 3.11 to 3.14 with the module venv."
  python=${rest#* }
}

# Everything that decides what .venv must hold, its own place included: a virtual environment cannot be moved.
wanted() {
  printf '%s in %s\n' "$kind" "$PWD"
  cat requirements.txt "$lock"
}

# True when .venv was finished by this script for this lock and nothing of it was lost since.
is_ready() {
  local installed
  [ -f .venv/setup.done ] && [ "$(wanted)" = "$(cat .venv/setup.lock)" ] || return 1
  read -r version python <.venv/setup.done
  [ "$(.venv/bin/python -E -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)" = "$version" ] || return 1
  while IFS= read -r installed; do
    [ -d "$installed" ] || return 1
  done <.venv/setup.packages
}

# Leaves things as they were unless the work was finished.
undo() {
  rm -f -- "$log"
  if [ "$finished" = yes ]; then
    rm -rf .venv.old
  else
    rm -rf .venv
    if [ -e .venv.old ] || [ -L .venv.old ]; then mv .venv.old .venv; fi
  fi
}

# step SENTENCE COMMAND...: quiet when it works; else the last lines that the command said, and the sentence.
step() {
  local sentence=$1
  shift
  "$@" >"$log" 2>&1 </dev/null && return
  grep -v -e '^WARNING: ' -e '^\[notice\]' -e '^ *$' "$log" | tail -n 6 | cut -c 1-300 | sed 's/^/  /' >&2
  if grep -q -i -e 'NewConnectionError' -e 'name resolution' -e 'timed out' -e 'ProxyError' -e 'unreachable' "$log"; then
    sentence="$sentence: the package index cannot be reached"
  elif grep -q 'No space left' "$log"; then
    sentence="$sentence: the disk is full"
  fi
  fail 1 "$sentence. Nothing was changed."
}

install() {
  local began=$SECONDS
  [ -w . ] || fail 1 "this folder cannot be written: $PWD"
  if [ -e .venv ] && [ ! -e .venv/pyvenv.cfg ] && [ -n "$(find .venv -type f 2>/dev/null | head -n 1)" ]; then
    fail 1 ".venv exists and is not a virtual environment; move it away and try again."
  fi
  log=$(mktemp "${TMPDIR:-/tmp}/setup.XXXXXX")
  finished=no
  trap undo EXIT
  trap 'exit 130' INT TERM HUP
  rm -rf .venv.old
  if [ -e .venv ] || [ -L .venv ]; then mv .venv .venv.old; fi

  printf 'Python %s (%s)\nInstalling %s, about a minute ...\n' "$version" "$python" "$lock"
  step "cannot make a virtual environment with $python" "$python" -E -m venv .venv
  step "cannot install $lock" .venv/bin/python -m pip install --quiet --no-deps --only-binary :all: -r "$lock"
  step "JAX does not start on this machine" env JAX_PLATFORMS=cpu .venv/bin/python -c 'import jax; jax.devices()'

  wanted >.venv/setup.lock
  for installed in .venv/lib/python3*/site-packages/*.dist-info; do printf '%s\n' "$installed"; done >.venv/setup.packages
  printf '%s %s\n' "$version" "$python" >.venv/setup.done
  du -sk .venv | awk '{printf "%.2f GB\n", $1 / 1e6 * 1.024}' >.venv/setup.size
  finished=yes
  printf 'Took %d s.\n' $((SECONDS - began))
}

main() {
  kind=${1-cpu}
  case "$#:$kind" in
    [01]:cpu) lock=requirements.txt ;;
    1:gpu | 1:tpu) lock=requirements-$kind.txt ;;
    1:-h | 1:--help) sed -n '2,4s/^# //p' "$PWD/setup.sh" && exit 0 ;;
    *) fail 2 "'$*' is not understood; use ./setup.sh [cpu|gpu|tpu]" ;;
  esac
  local old='' ready=no
  if is_ready; then ready=yes old=$python; fi
  if [ -n "${PYTHON:-}" ]; then
    take_python
    if [ "$python" != "$old" ]; then ready=no; fi
  elif [ "$ready" = no ]; then
    find_python
  fi
  if [ "$ready" = no ]; then install; fi
  printf 'Ready: Python %s (%s), %d packages, %s in .venv, JAX for %s.\n' \
    "$version" "$python" "$(wc -l <.venv/setup.packages)" "$(cat .venv/setup.size)" "$kind"
  printf 'Next:  .venv/bin/python train.py configs/base.yml\n'
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then # sourced by a test otherwise
  cd -- "$(dirname -- "$0")"
  main "$@"
fi
