#!/bin/sh
# Puts a curl that speaks HTTP/2 to proxies (8.1 or newer) at $1/curl: the
# system's where it is one, else that of Debian's backports, beside the system's.
set -eu
dir=$1
case $(curl --version 2>/dev/null | head -n 1) in
"curl "[0-7].* | "curl 8.0."* | "") ;;
*)
	mkdir -p "$dir"
	ln -sf "$(command -v curl)" "$dir/curl"
	exit
	;;
esac
[ ! -x "$dir/curl" ] || exit 0
. /etc/os-release
echo "make: the interoperation tests need a newer curl; taking that of $VERSION_CODENAME-backports"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$dir/root"
mirror=$(sed -n 's/^URIs: *//p; s/^deb \(\[[^]]*\] \)\?\([^ ]*\).*/\2/p' /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v security | head -n 1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $VERSION_CODENAME-backports main" >"$work/sources.list"
apt() {
	apt-get -qq -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$work/lists" \
		-o Dir::Cache="$work/cache" -o APT::Sandbox::User=root "$@"
}
apt update
(cd "$work" && apt download "curl/$VERSION_CODENAME-backports" "libcurl4/$VERSION_CODENAME-backports")
for deb in "$work"/*.deb; do dpkg-deb -x "$deb" "$dir/root"; done
printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$(dirname "$(ls "$dir"/root/usr/lib/*/libcurl.so.4)")" "$dir/root/usr/bin/curl" >"$dir/curl"
chmod +x "$dir/curl"
