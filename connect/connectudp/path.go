package connectudp

import (
	"net"
	"net/url"
	"strconv"
	"strings"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// pathPrefix is the default template, RFC 9298 section 2, up to its variables:
// "/.well-known/masque/udp/{target_host}/{target_port}/".
const pathPrefix = "/.well-known/masque/udp/"

func badRequest(format string, args ...any) error {
	return tunnel.Refusef(tunnel.BadRequest, "connectudp: "+format, args...)
}

// pathOf returns the path of a request for to.
func pathOf(to connect.Authority) string {
	host := to.Name.String()
	if to.Addr.IsValid() {
		host = strings.ReplaceAll(to.Addr.String(), ":", "%3A") // RFC 9298 section 3.1
	}
	return pathPrefix + host + "/" + strconv.Itoa(int(to.Port)) + "/"
}

// parsePath returns the target of a request with the path p. What is in the path is read
// as the authority of a CONNECT is.
func parsePath(p string) (to connect.Authority, err error) {
	rest, ok := strings.CutPrefix(p, pathPrefix)
	if !ok {
		return to, badRequest("path %q is not below %q", tunnel.Clip(p), pathPrefix)
	}
	rest, ok = strings.CutSuffix(rest, "/")
	host, port, both := strings.Cut(rest, "/")
	if !ok || !both || strings.ContainsAny(rest, "?#") {
		return to, badRequest("path %q is not %sHOST/PORT/", tunnel.Clip(p), pathPrefix)
	}
	if host, err = url.PathUnescape(host); err != nil || strings.ContainsAny(host, "[]/") {
		return to, badRequest("the host in path %q is not percent-encoded as it should be", tunnel.Clip(p))
	}
	if to, err = connect.ParseAuthority(net.JoinHostPort(host, port)); err != nil {
		return to, &tunnel.Error{Reason: tunnel.BadRequest, Err: err}
	}
	return to, nil
}
