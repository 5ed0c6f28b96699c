package file

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"culvert.dev/policy"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"go.yaml.in/yaml/v3"
)

// maxSize is the largest file that is read, in bytes.
const maxSize = 16 << 20

// A Config is a configuration file, with the defaults filled in.
type Config struct {
	Cluster   string        // this cluster's id; "" if it has none
	Mesh      registry.Mesh // the zone of its names, and the network the gateway is in
	Networks  []registry.Network
	Listeners []Listener
	Admin     string // host:port of the admin server, or unix:PATH; "" means none
	Control   bool   // adminControl: tunnels may be closed by TCP, too
	Limits    Limits
	Drain     Drain
	Log       Log
	Services  []*registry.Service
	Policies  []*policy.Policy
	Peers     []Peer
	Site      *Site // nil means that no site can join

	Enrollment *Enrollment // nil means that no device can join

	ServicePorts  *ServicePorts  // nil means that no service has a port to itself
	VIPs          *VIPs          // nil means that no service has an address to itself
	NAT           *NAT           // nil means that the router is asked for nothing
	UpstreamProxy *UpstreamProxy // nil means that gateways are dialed directly
	DNS           *DNS           // nil means that nothing is answered by DNS
	Kubernetes    *Kubernetes    // nil means that there is none
	Agent         *Agent         // nil means that this is no agent; its networks, services and listeners are among the others
	Reverse       *Reverse       // nil means that this gateway opens no reverse sessions
	Replicas      *Replicas      // nil means that this gateway knows of no other replicas
	Credentials   Credentials    // of files that the parts above name themselves
	Identity      *Identity      // nil means no tokens of issuers, and no keys and trust by name

	// GatewayTransport is how the gateways are asked that discovery has found; nil means
	// without TLS.
	GatewayTransport *registry.Hop

	// Warnings report what is allowed and probably not meant.
	Warnings Errors

	// Certificates are those that the gateway presents, from all files that the
	// configuration names for that.
	Certificates []Certificate

	tableListeners []*registry.Listener // of Snapshot

	text    digest      // of the file itself
	files   []string    // every file that was read
	sum     digest      // of what they contain
	digests fileDigests // of the first of them
}

// Protocols are those that a Listener may have.
var Protocols = []string{"sni", "connect", "connect-h2", "socks5", "http", "websocket", "proxy", "quic", "postgres", "ssh", "reverse-pool", "captured"}

// A Listener is an address at which the gateway accepts connections or datagrams.
type Listener struct {
	// Address is host:port, and udp://host:port for UDP; no host means every address
	// of this machine. It is unix:PATH for a Unix socket, and fd:NAME for
	// one that systemd passes.
	Address string `yaml:"address,required" as:"listenerAddress"`

	Mode            fs.FileMode `yaml:"mode" as:"socketMode" default:"0600"` // permission bits of the file of a Unix socket
	Group           string      `yaml:"group"`                               // of that file, by name or number; "" leaves it to the system
	PeerCredentials bool        `yaml:"peerCredentials"`                     // the user whose process connects to a Unix socket is the caller

	LocalUsers []LocalUser `yaml:"localUsers" what:"a user" as:"localUser" unique:"user" empty:"leave the key out for all users of this machine"` // that may connect, over loopback or by a Unix socket of systemd

	// Protocols, of Protocols, are spoken in the clear; empty means the first three, with
	// Auth without sni, with TLS none, and for UDP quic.
	Protocols []string `yaml:"protocols" what:"a protocol" oneof:"sni connect connect-h2 socks5 http websocket proxy quic postgres ssh reverse-pool captured" unique:"protocol" empty:"leave the key out for sni and connect"`

	TLS               []TLS `yaml:"tls,single" what:"tls" empty:"leave the key out where no TLS ends"` // that ends here, by names; empty means that none does
	EndWithCredential bool  `yaml:"endWithCredential"`                                                 // tunnels end when the credential does that they were opened with

	STUN       bool      `yaml:"stun"`                                        // Binding requests of STUN are answered, beside QUIC
	RequireTLS bool      `yaml:"requireTLS"`                                  // what clients send that did not come by TLS must begin as TLS
	Refusal    string    `yaml:"refusal" oneof:"alert close" default:"alert"` // of a TLS client
	Auth       *Auth     `yaml:"auth"`                                        // of a CONNECT, SOCKS or WebSocket client; nil means none is asked for
	Proxy      *Proxy    `yaml:"proxyProtocol"`                               // what is in front; nil means nothing that speaks the PROXY protocol
	WebSocket  WebSocket `yaml:"websocket"`                                   // of the protocol
	SSH        *SSH      `yaml:"ssh"`                                         // of the protocol; nil for a listener without it

	LoadBalancer *LoadBalancer `yaml:"loadBalancer"` // what is in front and ends HTTPS; nil means nothing

	// UnidentifiedCallers says what conditions of policies on identities are to callers
	// that have none: with "deny" and by default they deny, and with "defer" they are left
	// to the service where TLS passes through.
	UnidentifiedCallers string `yaml:"unidentifiedCallers" oneof:"deny defer"`

	Target `yaml:"service" as:"target"`
}

// A LocalUser is a user of this machine whose processes may connect to a port of loopback.
type LocalUser = registry.LocalUser

// A Target is the one service of a listener.
type Target struct {
	Service tunnel.Name // zero means any that is asked for
	Port    uint16      // of Service; 0 means its only one
}

func (l *Listener) check(*decoder, mapping) { l.Protocols = readable(l.Protocols) }

// UDP reports whether l is for datagrams.
func (l *Listener) UDP() bool { return isUDP(l.Address) }

// UnixSocket reports whether l is for a Unix socket.
func (l *Listener) UnixSocket() bool { return isSocket(l.Address) }

// A Proxy is a load balancer in front of a listener that begins every connection
// with a PROXY header.
type Proxy struct {
	From []netip.Prefix `yaml:"from,required" what:"a range" as:"cidr" unique:"range"` // its addresses; no other client may connect
}

func (p *Proxy) check(d *decoder, at mapping) {
	const hint = "list the ranges of the proxies in front"
	if n := at.value("from"); n != nil && n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
		d.errorf(n, hint, "from is empty, which would refuse every client")
	}
	checkEverybody(d, at, p.From)
}

// Limits bound what clients can use. A count is at least 1, or -1 for no limit, and
// a duration is more than 0. MaxTunnels may be 0.
type Limits struct {
	MaxTunnels                 int           `yaml:"maxTunnels"`                                    // open at once; 0 means as many as there are descriptors for
	MaxPendingConnections      int           `yaml:"maxPendingConnections,limit" default:"4096"`    // connections without a route yet
	MaxPendingPerClient        int           `yaml:"maxPendingPerClient,limit" default:"-1"`        // of them, of one client: an IPv4 address or IPv6 /64
	MaxConnectionsPerClient    int           `yaml:"maxConnectionsPerClient,limit" default:"-1"`    // connections of one client, and as many tunnels
	ConnectionRatePerClient    int           `yaml:"connectionRatePerClient,limit" default:"-1"`    // connections and streams a second of one client
	MaxConnectionsPerPrincipal int           `yaml:"maxConnectionsPerPrincipal,limit" default:"-1"` // tunnels of one verified identity
	ConnectionRatePerPrincipal int           `yaml:"connectionRatePerPrincipal,limit" default:"-1"` // tunnels a second of one verified identity
	FirstByteTimeout           time.Duration `yaml:"firstByteTimeout,min=1ms" default:"10s"`        // from accept to the first byte
	HandshakeTimeout           time.Duration `yaml:"handshakeTimeout,min=1ms" default:"5s"`         // from the first byte to the whole preamble
	IdleTimeout                time.Duration `yaml:"idleTimeout,min=1ms" default:"1h"`              // of a tunnel, without a byte either way
	UDPIdleTimeout             time.Duration `yaml:"udpIdleTimeout,min=1ms" default:"2m"`           // of a session of UDP, without a datagram either way
	HalfClosedTimeout          time.Duration `yaml:"halfClosedTimeout,min=1ms" default:"60s"`       // of a tunnel, silent with one side closed
	ConnectTimeout             time.Duration `yaml:"connectTimeout,min=1ms" default:"3s"`           // of one address
	ConnectTotalTimeout        time.Duration `yaml:"connectTotalTimeout,min=1ms" default:"10s"`     // of all addresses of a request
	Memory                     Memory        `yaml:"memory" as:"memory"`                            // of the process
}

// A Memory is a limit in bytes: 0 means what the system grants the process, if that
// is known, and -1 means none.
type Memory int64

// ParseMemory reads "auto", "none", or a number with one of the units KiB, MiB
// and GiB.
func ParseMemory(s string) (Memory, error) {
	switch s {
	case "auto":
		return 0, nil
	case "none":
		return -1, nil
	}
	if !strings.HasSuffix(s, "iB") {
		return 0, fmt.Errorf("%q is not auto, none, or a size such as 512MiB", clip(s))
	}
	return parseSize(s, leastMemory)
}

// parseSize reads a number with one of the units KiB, MiB and GiB.
func parseSize(s string, least Memory) (Memory, error) {
	for i, unit := range []string{"KiB", "MiB", "GiB"} {
		digits, ok := strings.CutSuffix(s, unit)
		if !ok {
			continue
		}
		n, err := strconv.ParseInt(digits, 10, 32)
		m := Memory(n) << (10 * (i + 1))
		if err != nil || m < least {
			return 0, fmt.Errorf("%q is not a whole number of %s, or less than %d MiB", clip(s), unit, least>>20)
		}
		return m, nil
	}
	return 0, fmt.Errorf("%q is not a size such as 512MiB", clip(s))
}

// leastMemory is the least limit that is accepted.
const leastMemory = 16 << 20

// Drain says how the gateway stops.
type Drain struct {
	Delay   time.Duration `yaml:"delay" default:"5s"`    // not ready, still accepting
	Timeout time.Duration `yaml:"timeout" default:"30s"` // from the signal until tunnels are aborted
}

// Log says what is logged, and in which format.
type Log struct {
	Format string     `yaml:"format" oneof:"text json" default:"text"`
	Level  slog.Level `yaml:"level" as:"logLevel"`
}

// Default returns the configuration of an empty file.
func Default() *Config { return defaults[configuration]().config() }

// Snapshot returns the networks, services and listeners of c for the registry.
func (c *Config) Snapshot() registry.Snapshot {
	if len(c.tableListeners) != len(c.Listeners) {
		c.tableListeners = tableListeners(c.Listeners)
	}
	return registry.Snapshot{Networks: c.Networks, Services: c.Services, Listeners: c.tableListeners, Policies: c.Policies, GatewayTransport: c.GatewayTransport, Mesh: &c.Mesh}
}

// Listens reports whether sources other than the file may bring listeners.
func (c *Config) Listens() bool {
	return c.Kubernetes != nil && (c.Kubernetes.GatewayAPI != nil || c.Kubernetes.ImportedServices != nil)
}

// Load reads the configuration file at path, of at most 16 MiB, and the files
// with credentials that it names. Mistakes are returned as Errors.
func Load(path string) (*Config, error) { return Reload(path, nil) }

// Reload is Load for a file that was read before, as current, which may be
// nil. It returns current itself if nothing has changed, and otherwise reuses the
// services whose text is the same, so that its time depends on what has changed.
func Reload(path string, current *Config) (*Config, error) {
	data, err := read(path, maxSize)
	if err != nil {
		return nil, err
	}
	if current.unchanged(path, data) {
		return current, nil
	}
	return reload(path, data, current)
}

// LoadFrom is Load for the content of r. Errors call the file name, and the files that
// the configuration names are relative to it.
func LoadFrom(name string, r io.Reader) (*Config, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxSize+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return reload(name, data, nil)
}

func reload(path string, data []byte, current *Config) (*Config, error) {
	d := parseChanged(path, data, current)
	if d == nil {
		d = parse(path, data)
		d.keepDigests(data, splitServices(data, len(d.cfg.Services)))
	}
	var before *Identity
	if current != nil {
		before = current.Identity
	}
	d.readFiles(path, data, before)
	d.checkInsecure()
	d.warnCertified()
	d.warnIdentity()
	if current == nil {
		d.checkNames()
	} else { // a running gateway takes up the rest
		d.keepCertificates(current)
	}
	if p := d.cfg.ServicePorts; p != nil && p.State != "" {
		p.State = d.beside(p.State)
	}
	if v := d.cfg.VIPs; v != nil && v.State != "" {
		v.State = d.beside(v.State)
	}
	if k := d.cfg.Kubernetes; k != nil && k.State != "" {
		k.State = d.beside(k.State)
	}
	if s := d.cfg.Site; s != nil && s.State != "" {
		s.State = d.beside(s.State)
	}
	for i := range d.cfg.Peers {
		d.cfg.Peers[i].State = d.besideIf(d.cfg.Peers[i].State)
	}
	if a := d.cfg.Agent; a != nil {
		a.Catalog.State = d.besideIf(a.Catalog.State)
	}
	if err := d.errs.sorted(); err != nil {
		return nil, err
	}
	return &d.cfg, nil
}

// unchanged reports whether c was read from data and from other files that have not
// changed and are writable by their owner only. c may be nil.
func (c *Config) unchanged(path string, data []byte) bool {
	if c == nil || len(c.files) == 0 || c.files[0] != path {
		return false
	}
	all := [][]byte{data}
	for _, name := range c.files[1:] {
		b, err := read(name, maxAuthSize)
		if err != nil || writable(name) != "" {
			return false
		}
		all = append(all, b)
	}
	secret := slices.ContainsFunc(c.Listeners, func(l Listener) bool { return l.Auth != nil })
	return sum(all...) == c.sum && !(secret && writable(path) != "")
}

// LoadRoutes is Load for a file of routes, as ParseRoutes reads it.
func LoadRoutes(path string) (*Config, error) { return ReloadRoutes(path, nil) }

// ReloadRoutes is LoadRoutes for a file that was read before, as current, which
// may be nil. It returns current itself where nothing has changed.
func ReloadRoutes(path string, current *Config) (*Config, error) {
	data, err := read(path, maxSize)
	if err != nil {
		return nil, err
	}
	if current.unchanged(path, data) {
		return current, nil
	}
	c := Default()
	if c.Services, err = ParseRoutes(path, data); err != nil {
		return nil, err
	}
	c.files = []string{path}
	c.sum = sum(data)
	return c, nil
}

// Parse reads a configuration from data. Errors call the file name. Parse opens no other
// file, so that Auth has only the names of its files. It returns mistakes as Errors.
func Parse(name string, data []byte) (*Config, error) {
	d := parse(name, data)
	if err := d.errs.sorted(); err != nil {
		return nil, err
	}
	return &d.cfg, nil
}

// read returns the content of a regular file of at most limit bytes.
func read(path string, limit int64) ([]byte, error) {
	// Stat before open: opening a FIFO would block.
	info, err := os.Stat(path)
	if err != nil {
		return nil, unreadable(err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%q is not a regular file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, unreadable(err)
	}
	defer f.Close()
	var b bytes.Buffer
	b.Grow(int(min(info.Size(), limit)) + bytes.MinRead)
	if _, err := b.ReadFrom(io.LimitReader(f, limit+1)); err != nil {
		return nil, err
	}
	if int64(b.Len()) > limit {
		return nil, fmt.Errorf("%q is larger than the limit of %d bytes", path, limit)
	}
	return b.Bytes(), nil
}

// unreadable returns the errors of missing and forbidden files in plain words.
func unreadable(err error) error {
	var pe *fs.PathError
	switch {
	case !errors.As(err, &pe):
	case errors.Is(err, fs.ErrNotExist):
		return &plainError{pe.Path + ": no such file", err}
	case errors.Is(err, fs.ErrPermission):
		return &plainError{pe.Path + ": permission denied", err}
	}
	return err
}

// A plainError is a system error with a message of our own.
type plainError struct {
	msg string
	err error
}

func (e *plainError) Error() string { return e.msg }
func (e *plainError) Unwrap() error { return e.err }
