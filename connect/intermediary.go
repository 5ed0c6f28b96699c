package connect

import (
	"net/netip"
	"strings"

	"culvert.dev/tunnel"
)

// An Intermediary is a load balancer in front of a listener, which ends TLS and sends requests on
// (RFC 9110 section 3.7). It says what is in other fields than usual. The zero value is none.
type Intermediary struct {
	// ClientField is the field in which the load balancer names the client, such as
	// X-Forwarded-For: a list of addresses, with or without a port, to whose end each proxy
	// on the way adds the address that it was called from. "" means that the client is the
	// connection's peer. It is for listeners at which only the load balancer can connect, as
	// anybody else could name any client: see tunnel.ListenerConfig.Proxies.
	ClientField string

	// Hops is how many proxies add to ClientField, of which the last one calls the gateway;
	// 0 means 1. The client is at that place from the end. What is before it, the client may
	// have written itself.
	Hops int

	// CredentialsField has the client's credentials, in place of Authorization and
	// Proxy-Authorization, which are then not looked at. "" means those.
	CredentialsField string
}

// Read makes the client that the load balancer names the Source of req. It returns the client's
// credentials, which usually are in the field with that name, and how many there are: 0 or 1. Its
// error is a *tunnel.Error.
func (m *Intermediary) Read(req *tunnel.Request, usual string, fields Fields) (sent string, n int, err error) {
	if m.ClientField != "" {
		if err := m.setSource(req, fields); err != nil {
			return "", 0, err
		}
	}
	if m.CredentialsField != "" {
		usual = m.CredentialsField
	}
	if sent, n = fields.Get(usual); n > 1 {
		return "", n, tunnel.Refusef(tunnel.BadRequest, "%d %s fields", n, usual)
	}
	return sent, n, nil
}

// setSource sets the Source of req.
func (m *Intermediary) setSource(req *tunnel.Request, fields Fields) error {
	hops := max(m.Hops, 1)
	left := hops
	for i := len(fields) - 1; i >= 0; i-- {
		if !strings.EqualFold(fields[i].Name, m.ClientField) {
			continue
		}
		for rest, more := fields[i].Value, true; more; {
			entry := rest
			if comma := strings.LastIndexByte(rest, ','); comma >= 0 {
				rest, entry = rest[:comma], rest[comma+1:]
			} else {
				more = false
			}
			if left--; left > 0 {
				continue
			}
			entry = strings.Trim(entry, " \t")
			source, ok := parseForwarded(entry)
			if !ok {
				return tunnel.Refusef(tunnel.BadRequest, "%s names the client %q, which is not an address", m.ClientField, tunnel.Clip(entry))
			}
			req.Source = source
			return nil
		}
	}
	return tunnel.Refusef(tunnel.BadRequest, "%s has %d addresses, and the client is expected at place %d from the end", m.ClientField, hops-left, hops)
}

// parseForwarded parses "192.0.2.7", "192.0.2.7:4711", "2001:db8::7" or "[2001:db8::7]:4711".
func parseForwarded(s string) (netip.AddrPort, bool) {
	ap, err := netip.ParseAddrPort(s)
	if err != nil {
		if inner, ok := strings.CutPrefix(s, "["); ok {
			if s, ok = strings.CutSuffix(inner, "]"); !ok || !strings.Contains(s, ":") {
				return ap, false
			}
		}
		addr, err := netip.ParseAddr(s)
		if err != nil {
			return ap, false
		}
		ap = netip.AddrPortFrom(addr, 0)
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), ap.Addr().Zone() == ""
}

// ReportRefused has h report a request that a Protocol of a single request refused by itself,
// if the load balancer has named another client than the connection's peer. It returns what
// ServeConn is to return: err, if h does not report it.
func (m *Intermediary) ReportRefused(h tunnel.Handler, req *tunnel.Request, err error) error {
	r, ok := h.(tunnel.Refuser)
	if !ok || m.ClientField == "" {
		return err
	}
	r.Refused(req, err)
	return nil
}
