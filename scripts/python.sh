# shellcheck shell=bash
# The environment of the Python tests: build/venv with torch, the packages of tests/python/requirements.txt, and the
# wheel of this checkout. Source this file after scripts/setup.sh.

# shellcheck disable=SC2034  # the list is for the scripts that source this
PYTHON_PACKAGES='
python3-dev           -           headers: the compiled part of the Python package
python3-venv          -           a virtual environment for the Python tests
'
TORCH='torch==2.13.0'

# Makes build/venv without this checkout's wheel. Keeps an environment that is up to date. Returns 1 on failure.
python_packages() {
  local venv=build/venv wanted
  wanted=$(cat tests/python/requirements.txt - <<<"$TORCH")
  if [ "$(cat $venv/requirements 2>/dev/null)" != "$wanted" ]; then
    rm -rf $venv
    quietly "Making build/venv" python3 -m venv $venv || return 1
    # first, because other packages would install another torch
    quietly "Installing torch" $venv/bin/pip install "$TORCH" || return 1
    quietly "Installing the Python tests' packages" $venv/bin/pip install -r tests/python/requirements.txt || return 1
    printf '%s\n' "$wanted" >$venv/requirements
  fi
}

# Returns 1 if no environment can be created.
python_environment() {
  python_packages || return 1
  python_package || die "the Python package must build: correct the errors above"
}

# Builds the wheel and installs it, if a source is newer than the wheel.
python_package() {
  local venv=build/venv werror=OFF wheel sources=(CMakeLists.txt README.md cmake include kernels pyproject.toml python src third_party vgpu)
  wheel=$(find build/wheel -name '*.whl' 2>/dev/null | head -n 1)
  if [ -n "$wheel" ] && [ -f $venv/installed ] && [ $venv/installed -nt "$wheel" ] &&
    [ -z "$(find "${sources[@]}" -newer "$wheel" -not -name __pycache__ -not -name '*.pyc' -print -quit)" ]; then
    return 0
  fi
  if [ "${CI:-}" = true ]; then werror=ON; fi
  rm -rf build/wheel $venv/installed
  # The release build has the same flags and the same names of the compilers, so that ccache has most objects.
  CC=${CC:-cc} CXX=${CXX:-c++} CMAKE_BUILD_PARALLEL_LEVEL=$(jobs_at_once) quietly "Building the Python package" \
    $venv/bin/pip wheel --no-deps --no-build-isolation -w build/wheel \
    --config-settings=cmake.define.TANDEM_WERROR=$werror . || return 1
  quietly "Installing the Python package" $venv/bin/pip install --force-reinstall --no-deps build/wheel/*.whl || return 1
  touch $venv/installed
}
