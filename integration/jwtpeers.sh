#!/bin/sh
# Puts packages of npm into $1/node_modules: oidc-provider, an OpenID Connect issuer, and
# jose, which signs and verifies tokens. Where npm cannot get them, the tests with them are
# left out.
set -eu
dir=$1
packages="oidc-provider@9.13.3 jose@6.2.18"
[ "$(cat "$dir/packages" 2>/dev/null || true)" != "$packages" ] || exit 0
command -v npm >/dev/null || { echo "make: no npm here: the tests of tokens with oidc-provider and jose are left out"; exit 0; }
echo "make: the interoperation tests need issuers of tokens; taking npm's $packages"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck disable=SC2086 # they are several
(cd "$work" && echo '{"private": true}' >package.json && npm install --silent --no-audit --no-fund --ignore-scripts $packages) ||
	{ echo "make: npm cannot get $packages: the tests of tokens with them are left out"; exit 0; }
rm -rf "$dir"
mkdir -p "$dir"
mv "$work/node_modules" "$dir"
chmod -R a+rX "$dir"
echo "$packages" >"$dir/packages"
