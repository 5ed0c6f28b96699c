package registry

import (
	"net/netip"
	"time"

	"culvert.dev/tunnel"
)

// Protocols of a Listener.
const (
	TLS  = "tls"  // by the name in the hello, passed on or ended here
	TCP  = "tcp"  // every connection to the one section
	UDP  = "udp"  // every datagram to the one section
	HTTP = "http" // nothing is carried: a client hears that HTTP is not routed
)

// A Listener is a socket that a Source asks for, and not the configuration: a port of
// a Gateway of Gateway API. Its clients reach what its Sections have and nothing
// else, whatever services there are. The gateway opens it, and closes it when it has
// left the table; its tunnels go on.
type Listener struct {
	Name     string // unique among all listeners: "default/edge/tls/443". Of one that stays at its address it may change
	Protocol string
	Address  netip.Addr // to listen at; the zero Addr means every address
	Port     uint16
	Sections []*Section // of TLS one for each host; one of TCP and UDP
	Origin   string     // who says so, for people
}

// A Section is the part of a listener that is for one host, with its rules. The
// section with the exact host of the client is chosen, or else the one with the
// longest wildcard, or else the one for any host. Where there is none, or none of its
// rules matches, the client is refused without a byte of TLS.
type Section struct {
	Name string          // unique among all sections: requests say it as their Listener
	Host tunnel.Pattern  // zero means any. A wildcard stands for one label or more
	TLS  *TLSTermination // nil passes TLS on; of TLS only

	Clients ClientFilter `json:",omitzero"` // those that may connect
	Rules   []*Rule      // in order of precedence

	// Istio routes names of the form "outbound_.PORT_.SUBSET_.SERVICE" to that
	// service and port, among all that are exposed: auto-passthrough.
	Istio bool
}

// TLSTermination says how TLS ends here.
type TLSTermination struct {
	Certificates       []KeyPair // at least one; the one with the name asked for is shown, or the first
	ClientCAs          string    // PEM, to verify clients by; "" means that none is asked for a certificate
	ClientCertOptional bool      // clients may come without one, or with one that can't be verified, and then have no identity
}

// A KeyPair is a certificate with its chain, and its key, in PEM.
type KeyPair struct {
	Certificate string
	Key         Secret `json:"-"`
}

// A Rule routes names to backends.
type Rule struct {
	Name        string           // for logs and metrics: "tlsroute/default/web"
	Names       []tunnel.Pattern // of TLS; empty means any
	Backends    []Backend        // each gets its share of the requests
	IdleTimeout time.Duration    // limit without a byte either way; 0 means the relay's
	Clients     ClientFilter     `json:",omitzero"` // those that may connect, of those that the section admits
	Origin      string           // who says so, for people
}

// A Backend is where a share of the requests of a rule goes.
type Backend struct {
	Weight  uint32   // of the sum of all; 0 means none
	Service *Service // its Names, Ports and exposure are not looked at, but for what a further gateway is asked for
	Broken  string   // unless "", why this share is refused

	// ServiceName names the service of the table whose endpoints are used if
	// Service has none: one that is imported from other clusters. It must be
	// exposed to the network of the client. Zero means none.
	ServiceName tunnel.Name
}

// A BackendTLS says how a gateway uses TLS to its backends. A backend that it
// cannot verify is refused; it never falls back to less.
type BackendTLS struct {
	ServerName  string   // in the hello, and in the certificate where there are no SANs
	Roots       string   // PEM, to verify by; "" means the system's
	SANs        []string // one of which the certificate must have: DNS names, or URIs if they have a "://"
	Certificate string   // PEM, to show there; "" for none
	Key         Secret   `json:"-"` // PEM, of Certificate
}
