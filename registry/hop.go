package registry

import (
	"net"
	"strconv"
	"strings"

	"culvert.dev/tunnel"
)

// A Hop is a further gateway on the way to a service. The last one is asked
// for the service's endpoints, by the names they have there.
type Hop struct {
	Proto     string   // how it is asked: "connect", "connect-h2", "connect-h3", "websocket", "hbone" or "socks5"
	Addresses []string // where it is; those after the first are for when it can't be used
	Token     Secret   `json:"-"` // to show there; "" for none
	User      string   // to show there, with Password; "" for nobody
	Roots     string   // PEM certificates to verify it by; "" means the system's
	HTTP2     bool     // WebSockets by wss may share connections of HTTP/2

	// ServerName is the name in its certificate, and in the requests for a WebSocket;
	// "" means the host of its address.
	ServerName string

	// TLS and Path are of a hop without Addresses, one of Gateway.Transports: see At.
	TLS  bool   // connect, connect-h2 and websocket are inside of TLS
	Path string // of websocket; "" means the default

	Password Secret `json:"-"` // of User
	Insecure bool   // plaintext may go there by a transport that is not Mutual, and Token and Password without TLS

	Certificate string // PEM, to show there; "" for none
	Key         Secret `json:"-"` // PEM, of Certificate

	// KeyName and TrustNames name a key and bundles of the gateway's identity.Store, in
	// place of Certificate, and of Roots and Trust.
	KeyName    string   `json:",omitempty"`
	TrustNames []string `json:",omitempty"`

	// ForwardIdentity says how requests to the last gateway on the way state who has made
	// them. It is of carriers with mutual TLS, WebSockets aside.
	ForwardIdentity HopIdentity `json:",omitzero"`

	// TokenFile has the token to show there, and JWTSVID says which one of the Workload
	// API is, in place of Token: "" and nil for none. They are asked each time.
	TokenFile string   `json:",omitempty"`
	JWTSVID   *JWTSVID `json:",omitempty"`

	// CredentialsField is the field in which the token, or User and Password, are sent; ""
	// means that of the protocol.
	CredentialsField string `json:",omitempty"`

	// Peers are the SPIFFE ids that the gateway may have, or "spiffe://domain" for
	// any of a trust domain; empty means that its certificate must have its name.
	// InnerPeers has the identities that may be behind it, in double HBONE; if it is
	// empty, none may.
	Peers      []string
	InnerPeers []string

	// Trust has the roots, PEM, to verify the gateway by, by the trust domain of its
	// SPIFFE id. It takes the place of Roots where Peers and InnerPeers are of several
	// trust domains.
	Trust map[string]string
}

// A HopIdentity says how a request to a next hop states who has made it. The zero one does
// not.
type HopIdentity struct {
	// Assertion is one that is signed with the key of the certificate for the hop, for that
	// one TLS session, in the field Culvert-Peer.
	Assertion bool `json:",omitzero"`

	// Source is the address and port of the client, in the field Culvert-Source. It is for
	// replicas of this gateway, which decide by it as this one does.
	Source bool `json:",omitzero"`

	// XFCC is the mode of the field X-Forwarded-Client-Cert: "sanitizeSet", "appendForward",
	// or "" for none. ClientCert has the certificate of the client in the fields of RFC 9440.
	XFCC       string `json:",omitempty"`
	ClientCert bool   `json:",omitzero"`
}

// CarriesDatagrams reports whether the gateways of h can be asked for datagrams, too.
func (h *Hop) CarriesDatagrams() bool { return h.Proto == "connect-h2" || h.Proto == "connect-h3" }

// CleartextAddress returns the first address of h that is dialed without TLS, and whether there is
// one. Where h is the first hop, loopback is none: nothing of that leaves the host.
func (h *Hop) CleartextAddress(first bool) (to string, ok bool) {
	for _, to := range h.Addresses {
		if !h.hasTLS(to) && (!first || !OnLoopback(h.HostPort(to))) {
			return to, true
		}
	}
	return "", false
}

// Security says how a stream to the gateway at to, one of h.Addresses, is protected.
func (h *Hop) Security(to string) tunnel.Security {
	return h.security(h.hasTLS(to))
}

// security is Security by whether h has TLS.
func (h *Hop) security(hasTLS bool) tunnel.Security {
	switch {
	case !hasTLS:
		return tunnel.Plain
	case h.Certificate == "" && h.KeyName == "" && h.User == "" && !h.ShowsToken():
		return tunnel.ServerVerified
	}
	return tunnel.Mutual
}

// ShowsToken reports whether a token is shown to the gateway.
func (h *Hop) ShowsToken() bool { return h.Token != "" || h.TokenFile != "" || h.JWTSVID != nil }

// A JWTSVID says which JWT-SVID of the gateway's own Workload API is shown.
type JWTSVID struct {
	Audience []string // at least one
	ID       string   // the SPIFFE id; "" means the agent's default
}

// ParseToken returns the token that a TokenFile contains; "" where there is none, or more
// than one word.
func ParseToken(content []byte) string {
	token := strings.TrimSpace(string(content))
	if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return ""
	}
	return token
}

// hasTLS reports whether h is asked at to by TLS.
func (h *Hop) hasTLS(to string) bool {
	switch h.Proto {
	case "hbone", "connect-h3":
		return true
	case "connect", "connect-h2":
		return strings.HasPrefix(to, "https://")
	case "websocket":
		return strings.HasPrefix(to, "wss://")
	}
	return false
}

// HostPort returns the host and port of to, one of h.Addresses.
func (h *Hop) HostPort(to string) string {
	if _, rest, ok := strings.Cut(to, "://"); ok {
		to, _, _ = strings.Cut(rest, "/")
	}
	return to
}

// hostOf returns the host of a HOST:PORT, whose port may be left out.
func hostOf(hostport string) string {
	host, _, err := net.SplitHostPort(hostport)
	if err != nil {
		host = hostport
	}
	return strings.Trim(host, "[]")
}

// portOf returns the port of a HOST:PORT.
func portOf(hostport string) uint16 {
	_, port, _ := net.SplitHostPort(hostport)
	n, _ := strconv.ParseUint(port, 10, 16)
	return uint16(n)
}
