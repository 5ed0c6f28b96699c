#!/bin/sh
# Writes go.mod for a version of Kubernetes: sh replaces.sh v1.36.3
# k8s.io/kubernetes names its staging modules by folders that its published
# module doesn't have; here each is replaced by what was published of it.
set -eu
cd "$(dirname "$0")"
version=$1
parts=v0.${version#v1.}
cd / && mod=$(go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/^\t"GoMod": "\(.*\)",$/\1/p')
cd "$OLDPWD"
{
	echo "module culvert.dev/integration/cluster/controlplane"
	echo
	sed -n '/^go /p' "$mod"
	echo
	echo "require k8s.io/kubernetes $version"
	echo
	sed -n '/^replace/,/^)/p' "$mod" | sed -E "s,=> \./staging/src/(.*),=> \1 $parts,"
} >go.mod
go mod tidy
