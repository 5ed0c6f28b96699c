package peer

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Limits of what a peer may send.
const (
	MaxLine     = 64 << 10 // bytes of one line
	MaxCatalog  = 16 << 20 // bytes of all services of a peer
	MaxServices = 10_000
	MaxNames    = 100_000 // of all services of a peer: short ones take little in a line, and far more in a table
	MaxGateways = 16
)

// Version is that of the messages.
const Version = 1

// The kinds of a Message.
const (
	KindHello       = "hello"       // the first one of each side
	KindSubscribe   = "subscribe"   // asks for the catalog: all of it, or what has changed since Generation
	KindUnsubscribe = "unsubscribe" // asks for no more of it
	KindSnapshot    = "snapshot"    // services of the whole catalog
	KindChange      = "change"      // services that are new or different, or Removed
	KindHeartbeat   = "heartbeat"
	KindBundle      = "bundle"
	KindDrain       = "drain" // the sender is about to stop: another gateway is to be asked
	KindError       = "error" // why the sender closes the stream
)

// A Message is a line of JSON. Fields that are not known are ignored, and another Version is
// refused.
type Message struct {
	Version int    `json:"version"`
	Kind    string `json:"kind"`

	// Site is the sender's own id, in a hello. Instance is another one with each start of a
	// sender: Generations of different instances cannot be compared.
	Site     string `json:"site,omitempty"`
	Instance string `json:"instance,omitempty"`

	// Reads says in a hello that the sender only reads, as an agent does: it need not be a peer of
	// the receiver, and is asked for nothing.
	Reads bool `json:"reads,omitempty"`

	// Generation is that of the sender's catalog, for this receiver. In a subscribe it is the
	// receiver's own, with the Instance that it is of; 0 asks for everything.
	Generation uint64 `json:"generation,omitempty"`

	// More says that the next line of the same Kind belongs to this one.
	More bool `json:"more,omitempty"`

	// Gateways are the sender's, as the receiver is to use them, in a hello, where none says
	// nothing. A heartbeat with Moved has those that take their place.
	Gateways []Gateway `json:"gateways,omitempty"`
	Moved    bool      `json:"moved,omitempty"`

	Services []Service `json:"services,omitempty"`
	Removed  []string  `json:"removed,omitempty"` // keys of services

	Bundle json.RawMessage `json:"bundle,omitempty"` // of the sender's own trust domain, in the SPIFFE format
	Error  string          `json:"error,omitempty"`
}

// A Gateway is one of a site, as others reach it.
type Gateway struct {
	Address    string   `json:"address"`    // host:port
	Transports []string `json:"transports"` // in order of preference, as in registry.Hop.Proto; all have TLS
	Weight     uint16   `json:"weight,omitempty"`
}

// A Service is one that a site offers.
type Service struct {
	Key   string   `json:"key"`            // what Removed calls it; one service of a catalog has it
	Site  string   `json:"site,omitempty"` // that it is of
	Name  string   `json:"name"`           // for people
	Names []string `json:"names"`          // that clients ask for

	Ports      []uint16    `json:"ports,omitempty"` // none means any
	NamedPorts []NamedPort `json:"namedPorts,omitempty"`
	ALPN       []string    `json:"alpn,omitempty"`
	OwnPort    uint16      `json:"ownPort,omitempty"` // of the sender's gateways that leads to it alone; 0 means none
	VIP        bool        `json:"vip,omitempty"`     // it makes sense to give it an address

	// Service, Namespace and Cluster are what it is called in its cluster, if that has
	// exported it to all others.
	Service   string `json:"service,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Cluster   string `json:"cluster,omitempty"`

	// Headless says that a service of the cluster set has no address of its own, and is no
	// part of one that has.
	Headless bool `json:"headless,omitempty"`
}

// A NamedPort is one of a Service's ports.
type NamedPort struct {
	Name     string `json:"name"`
	Protocol string `json:"protocol"`
	Port     uint16 `json:"port"`
}

var errLineTooLong = fmt.Errorf("a line is longer than the limit of %d bytes", MaxLine)

// readLine returns the next line without its end. It is valid until the next call, which
// passes the same buf.
func readLine(r *bufio.Reader, buf []byte) ([]byte, error) {
	buf = buf[:0]
	for {
		part, err := r.ReadSlice('\n')
		if len(buf)+len(part) > MaxLine {
			return buf, errLineTooLong
		}
		buf = append(buf, part...)
		switch {
		case err == nil:
			return buf[:len(buf)-1], nil
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(buf) > 0:
			return buf, io.ErrUnexpectedEOF
		default:
			return buf, err
		}
	}
}

// ParseMessage reads a line. It checks each field by itself, but for what only the receiver
// knows: whose names a service may have.
func ParseMessage(line []byte) (*Message, error) {
	m := new(Message)
	if len(line) > MaxLine {
		return nil, errLineTooLong
	}
	if err := json.Unmarshal(line, m); err != nil {
		return nil, fmt.Errorf("a line is not a message: %s", clip(err.Error()))
	}
	if m.Version != Version {
		return nil, fmt.Errorf("a message is of version %d, and this culvert knows version %d", m.Version, Version)
	}
	switch m.Kind {
	case KindHello, KindSubscribe, KindUnsubscribe, KindSnapshot, KindChange, KindHeartbeat, KindBundle, KindDrain, KindError:
	default:
		return nil, fmt.Errorf("a message is of the unknown kind %q", clip(m.Kind))
	}
	if len(m.Site) > maxWord || len(m.Instance) > maxWord {
		return nil, fmt.Errorf("a message has a word of more than %d bytes", maxWord)
	}
	if len(m.Gateways) > MaxGateways {
		return nil, fmt.Errorf("there are %d gateways, limit %d", len(m.Gateways), MaxGateways)
	}
	return m, nil
}

const (
	maxWord  = 253 // bytes of a name
	maxNames = 256 // of one service, and as many ports
	maxShown = 120 // bytes of a peer's text in an error
)

// clip shortens a peer's text, for an error.
func clip(s string) string {
	if len(s) > maxShown {
		return s[:maxShown] + "..."
	}
	return s
}

// size returns the bytes of s in a line without what JSON may add, so that a sender never
// counts less. It is more than 0.
func (s *Service) size() int {
	n := len(`{"key":"","name":"","names":[]}`)
	for _, word := range []string{s.Key, s.Site, s.Name, s.Service, s.Namespace, s.Cluster} {
		n += len(word)
	}
	for _, words := range [][]string{s.Names, s.ALPN} {
		for _, word := range words {
			n += len(word) + len(`""`)
		}
	}
	for _, p := range s.NamedPorts {
		n += len(`{"name":"","protocol":"tcp","port":1}`) + len(p.Name)
	}
	return n + len(s.Ports)*len("1,")
}

// check returns why nobody can use s.
func (s *Service) check() error {
	switch {
	case s.Key == "" || len(s.Key) > 2*maxWord:
		return errors.New("it has no usable key")
	case len(s.Name) > 2*maxWord, len(s.Site) > maxWord:
		return errors.New("a word of it is too long")
	case len(s.Names) > maxNames || len(s.Ports) > maxNames || len(s.NamedPorts) > maxNames || len(s.ALPN) > tunnel.MaxALPN:
		return fmt.Errorf("it has more than %d names, ports or named ports, or more than %d protocols", maxNames, tunnel.MaxALPN)
	}
	for _, p := range s.Ports {
		if p == 0 {
			return errors.New("it has the port 0")
		}
	}
	for _, p := range s.NamedPorts {
		if p.Port == 0 || p.Protocol != "tcp" && p.Protocol != "udp" || !isLabel(p.Name) {
			return fmt.Errorf("it has the named port %q, which is malformed", clip(p.Name))
		}
	}
	for _, a := range s.ALPN {
		if a == "" || len(a) > 255 { // RFC 7301 section 3.1
			return fmt.Errorf("it has the ALPN protocol %q, which is malformed", clip(a))
		}
	}
	return nil
}

// isLabel reports whether s is one label of a name.
func isLabel(s string) bool {
	n, err := tunnel.ParseName(s)
	return err == nil && n.String() == s && !strings.Contains(s, ".")
}

// Registered returns g as the registry has it, where it is asked by access, and why it
// cannot be used. An address that the Guard would refuse as that of a DNS name is refused
// here, too: the configuration does not name it.
func (g *Gateway) Registered(access registry.Hop, named bool) (registry.Gateway, error) {
	var out registry.Gateway
	host, digits, err := net.SplitHostPort(g.Address)
	port, bad := strconv.ParseUint(digits, 10, 16)
	if err != nil || bad != nil || port == 0 || len(g.Address) > 300 {
		return out, fmt.Errorf("gateway %q is not host:port", clip(g.Address))
	}
	out.Address.Port, out.Weight = uint16(port), g.Weight
	if out.Address.Addr, err = netip.ParseAddr(host); err == nil {
		out.Address.Addr = out.Address.Addr.Unmap()
		if why, forbidden := tunnel.Forbidden(out.Address.Addr); forbidden && !named {
			return out, fmt.Errorf("gateway %q may not be used: it is %s", clip(g.Address), why)
		}
	} else {
		name, err := tunnel.ParseName(host)
		if err != nil || registry.IsLocalhost(name.String()) {
			return out, fmt.Errorf("gateway %q may not be used", clip(g.Address))
		}
		out.Address.Host = name.String()
	}
	for _, proto := range g.Transports {
		hop := access
		hop.Proto = proto
		switch proto {
		case "connect", "connect-h2", "websocket":
			hop.TLS = true
		case "connect-h3", "hbone":
		default:
			continue // a protocol of later versions, or one without TLS
		}
		out.Transports = append(out.Transports, hop)
	}
	if len(out.Transports) == 0 {
		return out, fmt.Errorf("gateway %q has no transport that is known here", clip(g.Address))
	}
	return out, nil
}
