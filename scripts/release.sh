#!/usr/bin/env bash
# make release VERSION=x.y.z: checks that this commit is the release, builds dist/, and tags it. Pushes nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version="${1:-}"
python=.venv/bin/python

refuse() {
  echo "not released: $1" >&2
  exit 1
}

[[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || refuse "'$version' is not a version: make release VERSION=x.y.z"
[[ -z "$(git status --porcelain)" ]] || refuse "the working tree has changes: commit them"
! git rev-parse --quiet --verify "refs/tags/v$version" > /dev/null || refuse "the tag v$version exists"
stated="$($python -c 'from virnuc_core import __version__; print(__version__)')"
[[ "$stated" == "$version" ]] || refuse "virnuc_core.__version__ is $stated, not $version"
newest="$(grep --max-count=1 '^## ' CHANGELOG.md)"
[[ "$newest" == "## $version" ]] || refuse "CHANGELOG.md begins with '$newest', not with '## $version'"

$python -m pytest --quiet tests/unit/test_tools.py
make check
make dist
[[ -z "$(git status --porcelain)" ]] || refuse "the checks have changed the working tree"
git tag --annotate "v$version" --message "virnuc $version"
echo "v$version is tagged and in dist/. To publish it: git push origin v$version"
