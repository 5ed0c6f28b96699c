package ws

import (
	"crypto/sha1" //nolint:gosec // RFC 6455 says so, and nothing hangs on it
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

const (
	// DefaultPath is in front of the destination in the path of a request.
	DefaultPath = "/.culvert/tunnel/"

	// TargetField names the destination where the path does not.
	TargetField = "Culvert-Target"

	// Subprotocol is that of peers who know the end-of-stream message.
	Subprotocol = "culvert.v1"

	// plain is what clients of plain byte streams ask for. It changes nothing.
	plain = "binary"

	version = "13"
)

// acceptKey answers a Sec-WebSocket-Key, RFC 6455 section 4.2.2.
func acceptKey(key string) string {
	sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	return base64.StdEncoding.EncodeToString(sum[:])
}

// A statusError is a refusal whose status is not that of its Reason alone.
type statusError struct {
	status int
	extra  connect.Fields // what the status asks for
	err    error
}

func (e *statusError) Error() string { return e.err.Error() }
func (e *statusError) Unwrap() error { return e.err }

func refuse(r tunnel.Reason, status int, extra connect.Fields, format string, args ...any) error {
	return &statusError{status: status, extra: extra, err: tunnel.Refusef(r, "ws: "+format, args...)}
}

func bad(format string, args ...any) error {
	return tunnel.Refusef(tunnel.BadRequest, "ws: "+format, args...)
}

// An upgrade is what a handshake asks for.
type upgrade struct {
	key         string // Sec-WebSocket-Key
	subprotocol string // chosen; "" for none
}

// checkUpgrade judges what a handshake over HTTP/1.1 has and one over HTTP/2
// has not, RFC 6455 section 4.2.1.
func checkUpgrade(h *connect.Head) (u upgrade, err error) {
	if h.Method != http.MethodGet {
		return u, refuse(tunnel.BadMethod, http.StatusMethodNotAllowed, connect.Fields{{Name: "Allow", Value: "GET"}}, "method %q, want GET", tunnel.Clip(h.Method))
	}
	host, n := h.Fields.Get("Host")
	switch {
	case h.Minor < 1:
		return u, bad("handshake in HTTP/1.0")
	case n != 1:
		return u, bad("%d Host fields, want one", n)
	case strings.ContainsAny(host, " \t,@/"):
		return u, bad("Host field is not a host")
	}
	for _, name := range []string{"Content-Length", "Transfer-Encoding"} {
		if _, n := h.Fields.Get(name); n > 0 {
			return u, bad("handshake with %s", name)
		}
	}
	if !lists(h.Fields, "Upgrade", "websocket") {
		return u, refuse(tunnel.BadRequest, http.StatusUpgradeRequired, connect.Fields{{Name: "Upgrade", Value: "websocket"}}, "this is a culvert gateway, not a web server or a proxy for plain HTTP: use https:// and HTTP CONNECT")
	}
	if !lists(h.Fields, "Connection", "upgrade") {
		return u, bad("Connection does not name upgrade")
	}
	if err := checkVersion(h.Fields, http.StatusUpgradeRequired, connect.Field{Name: "Upgrade", Value: "websocket"}); err != nil {
		return u, err
	}
	key, n := h.Fields.Get("Sec-WebSocket-Key")
	raw, err := base64.StdEncoding.Strict().DecodeString(key)
	switch {
	case n != 1:
		return u, bad("%d Sec-WebSocket-Key fields, want one", n)
	case err != nil || len(raw) != 16:
		return u, bad("Sec-WebSocket-Key is not 16 bytes in base64")
	}
	u.key, u.subprotocol = key, choose(h.Fields)
	return u, nil
}

// checkVersion judges Sec-WebSocket-Version; another one is refused with the
// status, and with fields besides the version that would do.
func checkVersion(f connect.Fields, status int, more ...connect.Field) error {
	switch v, n := f.Get("Sec-WebSocket-Version"); {
	case n > 1:
		return bad("%d Sec-WebSocket-Version fields", n)
	case v != version:
		return refuse(tunnel.BadRequest, status, append(connect.Fields{{Name: "Sec-WebSocket-Version", Value: version}}, more...),
			"WebSocket version %q, want %s", tunnel.Clip(v), version)
	}
	return nil
}

// choose picks a subprotocol that the client asks for, "" for none.
func choose(f connect.Fields) string {
	for _, ours := range []string{Subprotocol, plain} {
		for _, field := range f {
			if strings.EqualFold(field.Name, "Sec-WebSocket-Protocol") && slices.Contains(words(field.Value), ours) {
				return ours
			}
		}
	}
	return ""
}

// lists reports whether a field that is a list has a word, in any case.
func lists(f connect.Fields, name, word string) bool {
	for _, field := range f {
		if strings.EqualFold(field.Name, name) && slices.ContainsFunc(words(field.Value), func(w string) bool { return strings.EqualFold(w, word) }) {
			return true
		}
	}
	return false
}

// words splits a list of RFC 9110 section 5.6.1.
func words(s string) []string {
	parts := strings.Split(s, ",")
	for i := range parts {
		parts[i] = strings.Trim(parts[i], " \t")
	}
	return parts
}

// destination finds where a request wants to go: behind prefix in the path of
// its target, or in Culvert-Target with the bare path. The path may have it in
// percent-encoding, as IPv6 needs.
func destination(target, prefix string, f connect.Fields) (connect.Authority, error) {
	if strings.ContainsAny(target, "?#") {
		return connect.Authority{}, bad("the target has a query")
	}
	rest, ok := strings.CutPrefix(target, prefix)
	if !ok && target == strings.TrimSuffix(prefix, "/") {
		rest, ok = "", true
	}
	if !ok {
		return connect.Authority{}, refuse(tunnel.BadRequest, http.StatusNotFound, nil, "path %q is not below %q", tunnel.Clip(target), prefix)
	}
	sent, n := f.Get(TargetField)
	switch {
	case n > 1:
		return connect.Authority{}, bad("%d %s fields", n, TargetField)
	case rest != "" && n > 0:
		return connect.Authority{}, bad("the destination is in the path and in %s", TargetField)
	case rest == "" && n == 0:
		return connect.Authority{}, bad("no destination: write it behind %q in the path, or in %s", prefix, TargetField)
	case n > 0:
		rest = sent
	default:
		plain, err := url.PathUnescape(rest)
		if err != nil {
			return connect.Authority{}, bad("the path is not percent-encoded as it should be")
		}
		rest = plain
	}
	to, err := connect.ParseAuthority(rest)
	if err != nil {
		return connect.Authority{}, &tunnel.Error{Reason: tunnel.BadRequest, Err: fmt.Errorf("ws: %s", strings.TrimPrefix(err.Error(), "connect: "))}
	}
	return to, nil
}
