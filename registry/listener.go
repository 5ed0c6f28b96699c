package registry

import (
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"time"

	"culvert.dev/tunnel"
)

// Protocols of a Listener. Clients of the first four reach what its Sections have and
// nothing else, whatever services there are. Those of the last two reach every service
// that is exposed to them.
const (
	TLS  = "tls"  // by the name in the hello, passed on or ended here
	TCP  = "tcp"  // every connection to the one section
	UDP  = "udp"  // every datagram to the one section
	HTTP = "http" // nothing is carried: a client hears that HTTP is not routed

	Streams   = "streams"   // of TCP, by the Protocols of its Settings
	Datagrams = "datagrams" // of UDP, by the Protocols of its Settings
)

// A Listener is a socket that a Source asks for: a listener of the configuration file,
// or a port of a Gateway of Gateway API. The gateway opens it, and closes it when it has
// left the table; its tunnels go on.
type Listener struct {
	Name      string // unique among all listeners: ":443", "default/edge/tls/443". Of one that stays at its address it may change
	Protocol  string
	Address   netip.Addr        // to listen at; the zero Addr means every address
	Host      string            // to listen at in place of Address: "localhost"
	Port      uint16            // 0 lets the system choose one, for Streams and Datagrams alone
	Unix      *UnixSocket       `json:"-"` // to listen at in place of all three, for Streams; nil for none
	Inherited string            `json:"-"` // name of the socket of systemd in place of all four, for Streams; "" for none
	Sections  []*Section        // of TLS one for each host; one of TCP and UDP
	Settings  *ListenerSettings `json:"-"` // of Streams and Datagrams
	Origin    string            // who says so, for people
}

// A UnixSocket is a socket for processes of this machine.
type UnixSocket struct {
	Path  string      // of its file; "@name" for an abstract socket, which has none
	Mode  fs.FileMode // permission bits of the file
	Group string      // name or number of the file's group; "" leaves it to the system
}

// ListenerSettings say what a listener offers whose clients reach every service.
type ListenerSettings struct {
	// Service, if it is not zero, is where everything goes, and nothing is read from
	// clients. Port is one of its ports; 0 means its only one.
	Service tunnel.Name
	Port    uint16

	// Protocols are spoken in the clear: "sni", "connect", "connect-h2", "socks5", "http",
	// "websocket", "postgres", "ssh", "reverse-pool", "captured" and "proxy", or "quic" for
	// Datagrams.
	Protocols []string

	// ImpliedSNI says that the source has not named Protocols: "sni" is among them
	// where there is no Auth, and may come and go with it.
	ImpliedSNI bool

	RefuseSilently    bool          // TLS and QUIC clients are cut off without an alert
	TLS               []ListenerTLS // that ends here, each for its names; empty means that none does
	EndWithCredential bool          // tunnels end when the credential does that they were opened with

	STUN          bool             // Binding requests of STUN are answered, beside QUIC
	RequireTLS    bool             // what clients send that did not come by TLS must begin as TLS
	Auth          *Auth            // of clients that have credentials; nil asks for none
	ProxyProtocol []netip.Prefix   // proxies that begin each connection with a PROXY header, alone may connect; empty for none
	LoadBalancer  *LoadBalancer    // in front, which ends TLS and names the client of each request; nil for none
	WebSocket     WebSocketOptions // of the protocol "websocket"
	SSH           *SSHSettings     // of the protocol "ssh"; nil where it is not spoken
	DeferIdentity bool             // callers without an identity are left to the service: see tunnel.Request

	// PeerCredentials makes the user of a process that connects to a UnixSocket the caller:
	// see tunnel.Process.
	PeerCredentials bool

	// LocalUsers are the users of this machine that may connect by TCP, which must be over
	// loopback; empty means everyone.
	LocalUsers []LocalUser
}

// A LocalUser is a user of this machine.
type LocalUser struct {
	Own bool   // the one that this process runs as
	UID uint32 // otherwise
}

// A LoadBalancer is one in front of a listener that ends TLS and sends requests on.
type LoadBalancer struct {
	From             []netip.Prefix // its addresses, which alone may connect; empty for a UnixSocket
	ClientField      string         // in which it names the client
	Hops             int            // how many proxies add to ClientField; 0 means 1
	CredentialsField string         // that has the client's credentials; "" means the usual ones
}

// ListenerTLS says how a listener ends TLS or QUIC for some names, and what is inside.
type ListenerTLS struct {
	TLSTermination
	Names []tunnel.Pattern // that end here; empty means the certificates', without wildcards
	Any   bool             // also names that are in no other ListenerTLS, and clients without a name

	// Protocols are spoken inside: "connect", "connect-h2", "hbone", "socks5" and
	// "websocket", or "connect-h3" for Datagrams; "connect-udp" beside connect-h2 or
	// connect-h3; or PlainTCP or "proxy" alone.
	Protocols []string

	ALPN []string // protocols that clients are offered with PlainTCP; empty means that ALPN is not spoken
}

// PlainTCP is the protocol of a stream inside TLS that goes to the service with the name
// that TLS was ended for. A request for such a service that has come by the same listener
// in any other way is refused where the ListenerTLS requires client certificates, unless
// the client has shown one that is as good.
const PlainTCP = "tcp"

// SSHSettings say who is let in by SSH, and by which key clients know the gateway. It is
// text as OpenSSH has it in files.
type SSHSettings struct {
	HostKey        Secret // a private key
	AuthorizedKeys Secret
	UserCAs        []SSHUserCA

	// Names are those by which clients connect to the gateway. DNS publishes Fingerprints,
	// those of HostKey, for them.
	Names        []tunnel.Name
	Fingerprints []SSHFingerprint
}

// An SSHFingerprint is what a record SSHFP says of a host key, RFC 4255 section 3.1.
type SSHFingerprint struct {
	Algorithm uint8  // of the key: 1 for RSA, 3 for ECDSA, 4 for Ed25519
	Hash      uint8  // 1 for SHA-1, 2 for SHA-256
	Digest    string // the bytes
}

// An SSHUserCA is a CA of users.
type SSHUserCA struct {
	Keys string // public keys, one on each line
	ID   string // of its users, with "{principal}" in it
}

// WebSocketOptions limit who may begin a WebSocket. An empty field means any.
type WebSocketOptions struct {
	Path    string
	Hosts   []string
	Origins []string
}

// An Auth has the credentials that a listener accepts: the password of one of the Users,
// one of the Tokens, or a JSON Web Token of one of the Issuers.
type Auth struct {
	Users  map[string]Secret      // bcrypt hashes by name, for Basic credentials and for SOCKS
	Tokens map[TokenDigest]string // names by token, for Bearer credentials

	Issuers []string // by name; what they are is not part of the table
}

// A TokenDigest is the SHA-256 of a token. It does not print itself.
type TokenDigest [32]byte

func (TokenDigest) String() string               { return Secret("").String() }
func (TokenDigest) GoString() string             { return Secret("").String() }
func (TokenDigest) MarshalText() ([]byte, error) { return Secret("").MarshalText() }

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

// TLSTermination says how TLS ends here, and what is asked of its clients.
type TLSTermination struct {
	// Keys name keys of the gateway's identity.Store. Certificates are in place of or beside
	// them. There is at least one; the one with the name asked for is shown, or the first.
	Keys         []string `json:",omitempty"`
	Certificates []KeyPair
	MinVersion   uint16 // as in crypto/tls; 0 means TLS 1.3 for Settings, and TLS 1.2 for Sections

	// ClientCAs has the PEM certificates to verify clients by, whatever identity these
	// have. Trust has them by the trust domain of the SPIFFE id that clients must have.
	// At most one of the two is set; with none, no client is asked for a certificate.
	// TrustNames name bundles of the gateway's identity.Store, in place of both.
	ClientCAs  string
	Trust      map[string]string
	TrustNames []string `json:",omitempty"`

	ClientCertOptional   bool // clients may come without a certificate, and then have no identity
	ClientCertUnverified bool // and with one that can't be verified
}

// ClientCertificates says what is asked of clients: "required", "optional" or "ignored".
func (t *TLSTermination) ClientCertificates() string {
	switch {
	case t.ClientCAs == "" && len(t.Trust) == 0 && len(t.TrustNames) == 0:
		return "ignored"
	case t.ClientCertOptional || t.ClientCertUnverified:
		return "optional"
	}
	return "required"
}

// requiresClientCert reports whether clients must show a certificate.
func (t *TLSTermination) requiresClientCert() bool { return t.ClientCertificates() == "required" }

// sameClients reports whether t and o verify the certificates of clients by the same.
func (t *TLSTermination) sameClients(o *TLSTermination) bool {
	return t.ClientCAs == o.ClientCAs && maps.Equal(t.Trust, o.Trust) && slices.Equal(t.TrustNames, o.TrustNames)
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

// SecretKey begins the names of keys that are Secrets of Kubernetes. NAMESPACE/NAME follows.
// No key of a configuration has a name with a slash.
const SecretKey = "secret/"

// A BackendTLS says how a gateway uses TLS to its backends. A backend that it
// cannot verify is refused; it never falls back to less.
type BackendTLS struct {
	ServerName  string   // in the hello unless it is an address, and in the certificate where there are no SANs
	Roots       string   // PEM, to verify by; "" means the system's
	SANs        []string // one of which the certificate must have: DNS names, addresses, or URIs if they have a "://"
	Certificate string   // PEM, to show there; "" for none
	Key         Secret   `json:"-"` // PEM, of Certificate

	// KeyName and TrustNames name a key and bundles of the gateway's identity.Store, in
	// place of Certificate and Roots. The names are in the table, and what they stand for
	// is not: it may change at any time.
	KeyName    string   `json:",omitempty"`
	TrustNames []string `json:",omitempty"`

	// PassClientTLS says that a client which begins TLS itself has it with the backend: the
	// gateway adds none.
	PassClientTLS bool `json:",omitzero"`

	MinVersion   uint16   `json:",omitzero"` // as in crypto/tls; 0 means TLS 1.2, which is the least
	MaxVersion   uint16   `json:",omitzero"` // 0 means TLS 1.3
	CipherSuites []string `json:",omitzero"` // of TLS 1.2, by their names in crypto/tls; empty means all that are secure. Those of TLS 1.3 can't be chosen
}
