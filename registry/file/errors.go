package file

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"culvert.dev/internal/edits"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// maxErrors is how many mistakes are reported at once.
const maxErrors = 20

// An Error is one mistake in a file.
type Error struct {
	File   string
	Line   int    // from 1
	Column int    // from 1, in characters
	Msg    string // what is wrong; never a secret
	Hint   string // what to do about it; may be empty
}

func (e *Error) Error() string {
	s := fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Column, e.Msg)
	if e.Hint != "" {
		s += "; " + e.Hint
	}
	return s
}

// Errors are all mistakes of a file, at most 20, in the order of the file.
type Errors []*Error

func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, err := range e {
		lines[i] = err.Error()
	}
	if len(e) == maxErrors {
		lines = append(lines, fmt.Sprintf("(the first %d mistakes; there may be more)", maxErrors))
	}
	return strings.Join(lines, "\n")
}

// Unwrap returns the mistakes for errors.As and errors.Is.
func (e Errors) Unwrap() []error {
	out := make([]error, len(e))
	for i, err := range e {
		out[i] = err
	}
	return out
}

// Is makes them a registry.ErrInvalid.
func (e Errors) Is(target error) bool { return target == registry.ErrInvalid }

// sorted returns e in the order of the file, the first maxErrors of it, and
// nil where there is none.
func (e Errors) sorted() error {
	if len(e) == 0 {
		return nil
	}
	slices.SortStableFunc(e, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return e[:min(len(e), maxErrors)]
}

// with returns e with one more, unless it has that already: a key may stand for several
// objects, with the same mistake in each.
func (e Errors) with(one *Error) Errors {
	if slices.ContainsFunc(e, func(other *Error) bool { return *other == *one }) {
		return e
	}
	return append(e, one)
}

// elsewhere are keys of other products' configurations and of earlier versions of
// this one, in lower case, and the keys that stand for them here.
var elsewhere = map[string][]string{
	"hostname": {"name"}, "hostnames": {"names"}, "host": {"name"}, "hosts": {"names"}, "domain": {"name"}, "domains": {"names"}, "servername": {"name"},
	"backend": {"endpoints"}, "backends": {"endpoints"}, "server": {"endpoints"}, "servers": {"endpoints"},
	"target": {"endpoints"}, "targets": {"endpoints"}, "upstream": {"endpoints", "upstreams"}, "upstreams": {"endpoints"}, "address": {"endpoints"}, "addresses": {"endpoints"},
	"healthcheck": {"check"}, "healthchecks": {"check"}, "health": {"check"}, "probe": {"check"},
	"timeout": {"limits", "connectTimeout", "idleTimeout"}, "timeouts": {"limits"}, "maxconnections": {"limits", "maxTunnels"}, "maxconn": {"limits", "maxTunnels"},
	"listen": {"listeners", "address"}, "bind": {"listeners", "address"}, "addr": {"address"}, "port": {"address", "ports"},
	"frontend": {"listeners"}, "frontends": {"listeners"}, "entrypoints": {"listeners"}, "routes": {"services"}, "routers": {"services"}, "clusters": {"services"},
	"logging": {"log"}, "loglevel": {"level", "log"}, "metrics": {"admin"}, "resolver": {"dns"}, "resolvers": {"dns"},
	"cert": {"certificateFile"}, "certfile": {"certificateFile"}, "certificate": {"certificateFile"}, "certificates": {"certificateFile"}, "key": {"keyFile"},
	"clientca": {"clientCAFile"}, "cacert": {"clientCAFile"}, "ca": {"clientCAFile", "caFile"}, "cafile": {"clientCAFile"},
	// Earlier names.
	"tunnels": {"maxTunnels"}, "halfopen": {"maxPendingConnections"}, "halfopenpersource": {"maxPendingPerClient"}, "openpersource": {"maxConnectionsPerClient"},
	"newpersource": {"connectionRatePerClient"}, "firstbyte": {"firstByteTimeout"}, "hello": {"handshakeTimeout"}, "idle": {"idleTimeout"}, "udpidle": {"udpIdleTimeout"},
	"halfclosed": {"halfClosedTimeout"}, "dial": {"connectTimeout"}, "dialtotal": {"connectTotalTimeout"},
	"lameduck": {"delay"}, "grace": {"timeout"},
	"unlimited": {"rateLimitExempt"}, "rate": {"rateLimit"}, "recursion": {"recursionClients"}, "private": {"privateZones"}, "vips": {"vipNetworks"}, "keep": {"reuseAfter"},
	// Protocols.
	"tls": {"sni"}, "https": {"sni"}, "ssl": {"sni"}, "http": {"connect"}, "http1": {"connect"}, "h1": {"connect"}, "h2": {"connect-h2"}, "http2": {"connect-h2"},
	"h3": {"connect-h3", "quic"}, "http3": {"connect-h3", "quic"}, "socks": {"socks5"}, "ws": {"websocket"}, "wss": {"websocket"}, "websockets": {"websocket"},
	"transparent": {"captured"}, "tproxy": {"captured"}, "redirect": {"captured"}, "capture": {"captured"}, "proxy-protocol": {"proxy"}, "proxyprotocol": {"proxy"},
}

// called returns the word of words that stands for s, or "".
func called(s string, words []string) string {
	plain := strings.NewReplacer("_", "", "-", "").Replace(strings.ToLower(s))
	for _, w := range elsewhere[plain] {
		if slices.Contains(words, w) {
			return w
		}
	}
	return meant(s, words)
}

// meant returns the word of words that differs from s by two edits at most, or "".
func meant(s string, words []string) string {
	best, distance := "", 3
	for _, w := range words {
		if d := edits.Distance(strings.ToLower(s), strings.ToLower(w), distance); d < distance && d < len(w) {
			best, distance = w, d
		}
	}
	return best
}

func clip(s string) string {
	return tunnel.Clip(s)
}
