package inbound

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"culvert.dev/identity"
	"culvert.dev/identity/jwt"
	"culvert.dev/internal/activation"
	"culvert.dev/internal/localuser"
	"culvert.dev/internal/udp"
	"culvert.dev/internal/unixsocket"
	"culvert.dev/registry"
	"culvert.dev/reverse"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// A Builder makes Listeners. Its fields must not be changed after the first.
type Builder struct {
	CurrentVia func() string          // returns this gateway's pseudonym; nil means it has none
	Table      func() *registry.Table // returns the current one

	// Of HTTP/3, as those of a tunnel.Server.
	Limits  tunnel.LimitsFunc
	Budget  *tunnel.Budget
	Observe func(*tunnel.Outcome)

	UDP              tunnel.Dialer  // to the endpoints of CONNECT-UDP requests
	DroppedDatagrams *atomic.Uint64 // counts those that were lost here; may be nil

	// STUN answers STUN at listeners that have it, as the Answer of a udp.Listener; nil answers
	// nothing.
	STUN func(datagram []byte, from netip.AddrPort) (answer []byte, taken bool)

	// Sessions registers the names that clients serve by SSH; nil refuses them.
	Sessions *reverse.Server

	Tokens *jwt.Tokens // of the issuers that listeners may accept; nil means none

	// CredentialGone is told of each that a listener with EndWithCredential no longer
	// accepts. May be nil.
	CredentialGone func(Credential)

	Log *slog.Logger // nil discards

	// Identity has the keys and the trust that listeners name; nil means that none is known.
	Identity *identity.Store

	once   sync.Once
	checks *checkQueue // of passwords, for all Listeners

	delegatesOnce sync.Once
	delegates     *delegates
}

// A Listener is what is served at the socket of a registry.Listener.
type Listener struct {
	builder  *Builder
	verifier *verifier // of Settings
	config   atomic.Pointer[config]
}

// A config is what a Listener serves by one table. It is not changed.
type config struct {
	*registry.Listener
	table     *registry.Table
	keySets   map[string]*sectionKeys // by section
	serving   *tunnel.ListenerConfig
	tls       *terminator // of serving; nil for none
	datagrams *Datagrams  // in place of serving, of a listener of UDP
}

// New returns a Listener for l of t.
func (b *Builder) New(t *registry.Table, l *registry.Listener) (*Listener, error) {
	b.once.Do(func() {
		b.checks = newCheckQueue(runtime.GOMAXPROCS(0) / 2)
		if b.Tokens == nil {
			b.Tokens = new(jwt.Tokens)
		}
		if b.Log == nil {
			b.Log = slog.New(slog.DiscardHandler)
		}
	})
	o := &Listener{builder: b}
	var err error
	if o.verifier, err = newVerifier(b); err != nil {
		return nil, err
	}
	return o, o.Use(t, l)
}

// Use has o serve l of t from the next connection on. After an error it serves what it
// served before, or that with all of l but the keys.
func (o *Listener) Use(t *registry.Table, l *registry.Listener) error {
	before := o.config.Load()
	next := &config{Listener: l, table: t}
	next.makeKeySets(o.builder.Identity, before)
	err := o.makeProtocols(next, before)
	if next.serving == nil && next.datagrams == nil {
		return err
	}
	o.config.Store(next)
	if before != nil && before.serving != nil && (next.serving == nil || &before.serving.Protocols[0] != &next.serving.Protocols[0]) {
		before.drain()
	}
	return err
}

// Drain asks the sessions of many streams to end with their last stream.
func (o *Listener) Drain() { o.config.Load().drain() }

func (c *config) drain() {
	if c.serving == nil {
		return
	}
	for _, p := range c.serving.Protocols {
		if d, ok := p.(tunnel.Drainer); ok {
			d.Drain()
		}
	}
}

// makeProtocols makes what next serves, as far as it can't be what before serves. Where
// it returns an error and next serves nothing, before is to stay.
func (o *Listener) makeProtocols(next, before *config) error {
	pin := func(p tunnel.Protocol) *tunnel.ListenerConfig {
		return &tunnel.ListenerConfig{Name: next.Name, Protocols: []tunnel.Protocol{p}}
	}
	switch next.Protocol {
	case registry.TLS:
		next.serving = pin(&tlsProtocol{o})
	case registry.HTTP:
		next.serving = pin(&httpProtocol{o})
	case registry.TCP:
		next.serving = pin(&tunnel.Fixed{Fill: o.routeAll})
	case registry.UDP:
		next.datagrams = &Datagrams{To: o.routeAll}
	case registry.Streams, registry.Datagrams:
		return o.makeSettings(next, before)
	default:
		return fmt.Errorf("there is no protocol %q", next.Protocol)
	}
	return nil
}

// makeSettings is makeProtocols for a listener with Settings.
func (o *Listener) makeSettings(next, before *config) (err error) {
	s := next.Settings
	if s == nil {
		return errors.New("the listener has no settings")
	}
	switch {
	case before != nil && before.Protocol == next.Protocol && reflect.DeepEqual(before.Settings, s):
		next.serving, next.tls, next.datagrams = before.serving, before.tls, before.datagrams
		if next.serving != nil && next.Name != before.Name {
			renamed := *before.serving
			renamed.Name = next.Name
			next.serving = &renamed
		}
		return nil
	case before != nil && before.Protocol == next.Protocol && reflect.DeepEqual(fixed(before.Settings), fixed(s)):
		next.serving, next.tls, next.datagrams = before.serving, before.tls, before.datagrams
		if !reflect.DeepEqual(before.Settings.SSH, s.SSH) {
			o.changeSSH(next, before.Settings.SSH, s)
		}
		if len(s.TLS) > 0 && !reflect.DeepEqual(before.Settings.TLS, s.TLS) {
			if next.datagrams != nil {
				err = next.datagrams.HTTP3.useItems(o.builder.Identity, s.TLS)
			} else {
				err = next.tls.use(s.TLS)
			}
			if err != nil {
				err = fmt.Errorf("keeping the current certificates: %w", err)
			}
		}
	case next.Protocol == registry.Datagrams:
		if next.datagrams, err = o.newDatagrams(s); err != nil {
			next.datagrams = nil
			return err
		}
	default:
		ps, term, err := o.streamProtocols(s)
		if err != nil {
			return err
		}
		next.serving = &tunnel.ListenerConfig{Name: next.Name, Protocols: ps, ConnHeader: connHeader(s), RequireTLS: s.RequireTLS, PeerCredentials: s.PeerCredentials}
		if check := localUsers(s); check != nil {
			next.serving.AdmitPeer, next.serving.AdmitProcess = check.Admit, check.AdmitProcess
		}
		if s.LoadBalancer != nil {
			next.serving.Proxies = s.LoadBalancer.From
		}
		next.tls = term
	}
	o.verifier.gone = nil
	if s.EndWithCredential && o.builder.CredentialGone != nil {
		o.verifier.gone = func(method, id string) { o.builder.CredentialGone(Credential{next.Name, method, id}) }
	}
	change, failed := o.verifier.use(s.Auth)
	if failed != nil {
		next.serving, next.datagrams = nil, nil
		return failed
	}
	logCredentials(o.builder.Log, next.Name, change)
	return err
}

// localUsers returns what admits the users that s names; nil where it names none.
func localUsers(s *registry.ListenerSettings) *localuser.Check {
	if len(s.LocalUsers) == 0 {
		return nil
	}
	check := &localuser.Check{}
	for _, u := range s.LocalUsers {
		if u.Own {
			u.UID = uint32(os.Geteuid())
		}
		check.UIDs = append(check.UIDs, u.UID)
	}
	return check
}

// fixed returns s without what changes in place.
func fixed(s *registry.ListenerSettings) registry.ListenerSettings {
	out := *s
	out.Auth, out.TLS, out.EndWithCredential = nil, nil, false
	for i := range s.TLS {
		// Those of UDP have the same protocols.
		if t := &s.TLS[i]; !plain(t) && (i == 0 || !slices.Contains(t.Protocols, "connect-h3")) {
			out.TLS = append(out.TLS, registry.ListenerTLS{Protocols: t.Protocols})
		}
	}
	if s.SSH != nil {
		out.SSH = &registry.SSHSettings{}
	}
	if len(s.TLS) > 0 && out.TLS == nil {
		out.TLS = []registry.ListenerTLS{} // there is TLS, of services alone
	}
	return out
}

// Current is for tunnel.Listener.Current.
func (o *Listener) Current() *tunnel.ListenerConfig { return o.config.Load().serving }

// Datagrams returns what is served at a listener of UDP; nil at one of TCP.
func (o *Listener) Datagrams() *Datagrams { return o.config.Load().datagrams }

// Table returns what o serves as the table has it.
func (o *Listener) Table() *registry.Listener { return o.config.Load().Listener }

// CanUse reports whether Use suffices for l at the socket of o. The sessions of UDP
// belong to their socket: where they lead elsewhere, it is another one.
func (o *Listener) CanUse(l *registry.Listener) bool {
	was := o.Table()
	switch l.Protocol {
	case registry.UDP:
		return was.Protocol == l.Protocol && was.Name == l.Name
	case registry.Datagrams:
		return o.MovesTo(l)
	}
	return was.Protocol != registry.UDP && was.Protocol != registry.Datagrams
}

// MovesTo reports whether l is what o serves, at another address.
func (o *Listener) MovesTo(l *registry.Listener) bool {
	was := o.Table()
	return was.Settings != nil && l.Settings != nil && was.Protocol == l.Protocol && reflect.DeepEqual(fixed(was.Settings), fixed(l.Settings))
}

// Problem says which sections can't be served, and notes each by its name.
func (o *Listener) Problem(parts map[string]error) error { return o.config.Load().problem(parts) }

// Address returns the address of l, as those of the configuration are written.
func Address(l *registry.Listener) string {
	if l.Unix != nil {
		return unixsocket.Prefix + l.Unix.Path
	}
	if l.Inherited != "" {
		return activation.Prefix + l.Inherited
	}
	host := l.Host
	if l.Address.IsValid() {
		host = l.Address.String()
	}
	s := net.JoinHostPort(host, strconv.Itoa(int(l.Port)))
	if l.Protocol == registry.UDP || l.Protocol == registry.Datagrams {
		s = udp.Scheme + s
	}
	return s
}

// A Sectioned is a Protocol of a listener with Sections.
type Sectioned interface {
	// Route completes the request of a client that asks for host, without the
	// client. Req.Proto is what it is called.
	Route(req *tunnel.Request, host string) error
}

// Route implements Sectioned.
func (f *httpProtocol) Route(*tunnel.Request, string) error {
	return tunnel.Refusef(tunnel.Unsupported, "listener %s: HTTP is not routed", f.l.Table().Name)
}

// Route implements Sectioned.
func (f *tlsProtocol) Route(req *tunnel.Request, host string) (err error) {
	has := f.l.config.Load()
	req.Listener, req.Proto = has.Name, "sni"
	if host != "" {
		if req.Name, err = sni.ParseName(host); err != nil {
			return err
		}
	}
	if !f.route(has, req) {
		req.Proto = "tls"
		if k := has.keySets[req.Listener]; k.err != nil {
			return &tunnel.Error{Reason: tunnel.Internal, Err: k.err}
		}
	}
	return nil
}
