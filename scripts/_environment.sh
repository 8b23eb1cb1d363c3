# Sourced by the other scripts, which then call `use_environment` or `use_environment dev`, from the project's root.
#
# Where a virtual or conda environment is active, that one is used; elsewhere .venv is made and activated. In both,
# what is missing is installed, and nothing is where nothing is: a second run costs a fraction of a second.

_suitable_python() {
    local candidate
    for candidate in python3 python python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "no Python 3.10 or later with the venv module was found on PATH" >&2
    return 1
}

# True where this checkout and, with `dev`, what its checks need are installed in the environment.
_is_installed() {
    python - "$PWD" "$1" <<'PYTHON'
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

root, extra = sys.argv[1:]
try:
    origin = json.loads(metadata.distribution("torch-rollback").read_text("direct_url.json") or "{}")
    if Path(unquote(urlparse(origin.get("url", "")).path)) != Path(root).resolve():
        sys.exit(1)
    for requirement in metadata.requires("torch-rollback") or []:
        needed_by = re.search(r"""extra == ["'](.+?)["']""", requirement)
        if needed_by is None or needed_by[1] == extra:
            metadata.distribution(re.match(r"[\w.-]+", requirement)[0])
except metadata.PackageNotFoundError:
    sys.exit(1)
PYTHON
}

# What was asked for: an environment that was made for other requirements is brought up to date.
_requirements() {
    cat pyproject.toml constraints.txt | cksum
}

use_environment() {
    local extra="${1:-}" python stamp
    if [[ -z "${VIRTUAL_ENV:-}" && -z "${CONDA_PREFIX:-}" ]]; then
        if [[ ! -x .venv/bin/python ]]; then
            python="$(_suitable_python)" || return 1
            echo "making the environment .venv with $python" >&2
            "$python" -m venv .venv || return 1
        fi
        # shellcheck disable=SC1091
        source .venv/bin/activate || return 1
    fi
    stamp="${VIRTUAL_ENV:-$CONDA_PREFIX}/.rollback-requirements"
    if [[ "$(cat "$stamp" 2>/dev/null)" != "$(_requirements)" ]] || ! _is_installed "$extra"; then
        echo "installing rollback${extra:+ [$extra]} and what it needs into ${VIRTUAL_ENV:-$CONDA_PREFIX}" >&2
        python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${extra:+[$extra]}" || return 1
        _requirements >"$stamp"
    fi
}
