package admin

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"culvert.dev/internal/unixsocket"
)

// CheckAddr returns an error if addr is neither a HOST:PORT to listen on nor
// unix:PATH, or if other hosts could reach it and allowRemote is false.
// "localhost" is taken to be loopback; any other name, and no host at all, is
// not.
func CheckAddr(addr string, allowRemote bool) error {
	if path, ok := SocketPath(addr); ok {
		if err := unixsocket.CheckPath(path); err != nil {
			return fmt.Errorf("admin address %q: %w", addr, err)
		}
		return nil
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("admin address %q: want HOST:PORT or unix:PATH: %w", addr, err)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("admin address %q: port %q: want a number from 0 to 65535", addr, port)
	}
	if allowRemote || isLocalhost(host) {
		return nil
	}
	if ip, err := netip.ParseAddr(host); err == nil && ip.Unmap().IsLoopback() {
		return nil
	}
	return fmt.Errorf("admin address %q can be reached from other hosts, and the admin port has no passwords: listen on 127.0.0.1:%s", addr, port)
}

func isLocalhost(host string) bool {
	return strings.EqualFold(strings.TrimSuffix(host, "."), "localhost")
}

// knownHost reports whether host, a Host header's, can only come from someone
// who meant this server. A page of another site that pointed its own name at
// our address (DNS rebinding) sends its own name.
func (a *Admin) knownHost(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	} else {
		host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	}
	if host == "" { // HTTP/1.0, which no browser speaks but health checks do
		return true
	}
	if _, err := netip.ParseAddr(host); err == nil || isLocalhost(host) {
		return true
	}
	for _, h := range a.Hosts {
		if strings.EqualFold(strings.TrimSuffix(host, "."), h) {
			return true
		}
	}
	return false
}
