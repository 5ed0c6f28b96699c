#!/bin/sh
# Puts systemd-resolved at $1/systemd-resolved: the system's where it has one, else
# that of the distribution's package, which is unpacked there and not installed.
set -eu
dir=$1
mkdir -p "$dir"
for have in /usr/lib/systemd/systemd-resolved /lib/systemd/systemd-resolved; do
	if [ -x "$have" ]; then
		ln -sf "$have" "$dir/systemd-resolved"
		exit
	fi
done
[ ! -x "$dir/systemd-resolved" ] || exit 0
command -v apt-get >/dev/null || { echo "make: no systemd-resolved and no apt-get here: install it yourself"; exit 1; }
echo "make: the tests of DNS need a systemd-resolved; unpacking the distribution's"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
# Its library must be of the same version, whatever is installed.
download() { (cd "$work" && apt-get -qq -o APT::Sandbox::User=root "$@" download systemd-resolved libsystemd-shared); }
if ! download 2>/dev/null; then # the system's lists are missing or old
	apt-get -qq -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root update
	download -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache"
fi
rm -rf "$dir/root" "$dir/systemd-resolved"
for deb in "$work"/*.deb; do dpkg-deb -x "$deb" "$dir/root"; done
lib=$(dirname "$(ls "$dir"/root/usr/lib/*/systemd/libsystemd-shared-*.so "$dir"/root/usr/lib/systemd/libsystemd-shared-*.so 2>/dev/null | head -n 1)")
bin=$(ls "$dir/root/usr/lib/systemd/systemd-resolved" "$dir/root/lib/systemd/systemd-resolved" 2>/dev/null | head -n 1)
if LD_LIBRARY_PATH=$lib ldd "$bin" | grep 'not found'; then
	echo "make: systemd-resolved needs these libraries: install them, those of libsystemd-shared"
	exit 1
fi
printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$lib" "$bin" >"$dir/systemd-resolved"
chmod +x "$dir/systemd-resolved"
