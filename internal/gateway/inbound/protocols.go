package inbound

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"slices"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/hbone"
	"culvert.dev/connect/proxyproto"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ssh"
	"culvert.dev/connect/ws"
	"culvert.dev/identity"
	"culvert.dev/internal/capture"
	"culvert.dev/internal/postgres"
	"culvert.dev/internal/termination"
	"culvert.dev/registry"
	"culvert.dev/reverse"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

// streamProtocols makes the protocols of a listener of Streams, and returns what
// terminates TLS, if something does.
func (l *Listener) streamProtocols(s *registry.ListenerSettings) ([]tunnel.Protocol, *terminator, error) {
	var to *tunnel.Fixed
	if !s.Service.IsZero() {
		if to = (&tunnel.Fixed{To: s.Service, Port: s.Port}); len(s.TLS) == 0 {
			return []tunnel.Protocol{to}, nil, nil
		}
	}
	outer, err := l.speak(s.Protocols, s, false)
	if err != nil || len(s.TLS) == 0 {
		return outer, nil, err
	}
	t := &terminator{protocol: &termination.Protocol{}, to: to, check: l.precheck(to), store: l.builder.Identity}
	for i := range s.TLS {
		if plain(&s.TLS[i]) {
			continue
		}
		inner, err := l.speak(s.TLS[i].Protocols, s, true)
		if err != nil {
			return nil, nil, err
		}
		t.inner = append(t.inner, inner)
	}
	p := t.protocol
	at := slices.IndexFunc(outer, func(p tunnel.Protocol) bool { return p.Name() == "sni" })
	if at >= 0 {
		p.Hello, p.Pass = outer[at].(*sni.Protocol), true
		outer[at] = p
	} else {
		p.Hello = &sni.Protocol{Refusal: refusal(s), Nameless: true}
		outer = append([]tunnel.Protocol{p}, outer...)
	}
	for _, o := range outer {
		if o, ok := o.(*postgres.Protocol); ok {
			o.TLS = p
		}
	}
	return outer, t, t.use(s.TLS)
}

// A terminator terminates TLS at a listener of Streams.
type terminator struct {
	protocol *termination.Protocol
	inner    [][]tunnel.Protocol         // of each item whose streams are not plain
	to       *tunnel.Fixed               // of plain streams; nil for the name that TLS ends for
	check    func(*tunnel.Request) error // before a certificate is shown for a service
	store    *identity.Store
}

// use has items terminate TLS from the next connection on. Those whose streams are not
// plain have the protocols of the items that t was made for.
func (t *terminator) use(items []registry.ListenerTLS) error {
	var all []termination.Item
	inner := t.inner
	for i := range items {
		from := &items[i]
		k, err := keys(t.store, from)
		if err != nil {
			return err
		}
		to := termination.Item{Keys: k, Any: from.Any}
		if plain(from) {
			to.Inner, to.Check = []tunnel.Protocol{termination.Plain{To: t.to}}, t.check
			for _, name := range from.ALPN {
				to.ALPN = append(to.ALPN, termination.Offer{Name: name})
			}
		} else {
			to.Inner, inner = inner[0], inner[1:]
			to.ALPN = offered(to.Inner)
		}
		all = append(all, to)
	}
	return t.protocol.Use(all...)
}

// plain reports whether the streams inside TLS go to services as they are.
func plain(t *registry.ListenerTLS) bool { return slices.Contains(t.Protocols, registry.PlainTCP) }

// precheck returns what says why the client of a hello is refused whose stream is for a service:
// that of to, or where that is nil the one with the name of the hello.
func (l *Listener) precheck(to *tunnel.Fixed) func(*tunnel.Request) error {
	return func(req *tunnel.Request) error {
		if to == nil {
			return l.builder.Table().PrecheckRoute(req)
		}
		name := req.Name
		to.Direct(req)
		err := l.builder.Table().PrecheckRoute(req)
		if err == nil {
			req.Name, req.Port = name, 0 // by which the handshake goes on
		}
		return err
	}
}

func refusal(s *registry.ListenerSettings) sni.Refusal {
	if s.RefuseSilently {
		return sni.RefuseClose
	}
	return sni.RefuseAlert
}

// offered is what ALPN is told of the inner protocols.
func offered(inner []tunnel.Protocol) []termination.Offer {
	two, one := termination.Offer{Name: "h2"}, termination.Offer{Name: "http/1.1"}
	for _, p := range inner {
		switch p.Name() {
		case "connect-h2", "hbone":
			two.Protocols = append(two.Protocols, p)
		case "connect", "websocket":
			one.Protocols = append(one.Protocols, p)
		case "socks5":
			return nil // it has no name in ALPN, and who offers others may speak it
		}
	}
	return slices.DeleteFunc([]termination.Offer{two, one}, func(o termination.Offer) bool { return len(o.Protocols) == 0 })
}

// keys returns the keys that t terminates TLS with.
func keys(store *identity.Store, t *registry.ListenerTLS) (*termination.Keys, error) {
	k, err := terminationKeys(store, &t.TLSTermination)
	if err == nil {
		k.Names = t.Names
	}
	return k, err
}

// terminationKeys returns the keys that t terminates TLS with, for no names of their own.
func terminationKeys(store *identity.Store, t *registry.TLSTermination) (*termination.Keys, error) {
	if store == nil {
		store = new(identity.Store)
	}
	k := &termination.Keys{Optional: t.ClientCertOptional, Unverified: t.ClientCertUnverified, MinVersion: t.MinVersion}
	for _, name := range t.Keys {
		k.Certificates = append(k.Certificates, store.Key(name))
	}
	for _, name := range t.TrustNames {
		k.Trust = append(k.Trust, store.Trust(name))
	}
	for i, p := range t.Certificates {
		pair, err := tls.X509KeyPair([]byte(p.Certificate), []byte(p.Key))
		if err != nil {
			return nil, fmt.Errorf("certificate %d of %d: %w", i+1, len(t.Certificates), err)
		}
		k.Certificates = append(k.Certificates, identity.NewKey(&pair))
	}
	if t.ClientCAs != "" {
		cas, err := identity.ParseCertificates(t.ClientCAs)
		if err != nil {
			return nil, errors.New("the CAs for clients hold no certificate")
		}
		k.Trust = append(k.Trust, identity.NewTrust("", cas...))
	}
	for _, domain := range slices.Sorted(maps.Keys(t.Trust)) {
		cas, err := identity.ParseCertificates(t.Trust[domain])
		if err != nil {
			return nil, fmt.Errorf("the CAs of the trust domain %q hold no certificate", domain)
		}
		k.Trust = append(k.Trust, identity.NewTrust(domain, cas...))
	}
	return k, nil
}

// An impliedSNI is TLS by name at a listener that names no protocols. It is off while the
// listener asks for credentials, for which TLS by name has no place.
type impliedSNI struct {
	*sni.Protocol
	auth *verifier
}

// Off reports that TLS by name is not spoken.
func (p *impliedSNI) Off() bool { return !p.auth.Off() }

// Sniff implements tunnel.Protocol.
func (p *impliedSNI) Sniff(prefix []byte) tunnel.Verdict {
	if p.Off() {
		return tunnel.No
	}
	return p.Protocol.Sniff(prefix)
}

// speak makes the protocols of those names, in the clear or inside TLS that ends here.
func (l *Listener) speak(names []string, s *registry.ListenerSettings, inside bool) ([]tunnel.Protocol, error) {
	auth, via, front := l.verifier, l.builder.CurrentVia, intermediary(s)
	// CONNECT takes every method, to say what is wrong with it, so WebSocket is
	// asked before it.
	names = slices.Clone(names)
	slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(rank(a), rank(b)) })
	var ps []tunnel.Protocol
	var carrier *h2.Protocol
	var sockets *ws.Protocol
	var extended []connect.ExtendedService
	for _, name := range names {
		switch name {
		case "sni":
			if p := (&sni.Protocol{Refusal: refusal(s), Nameless: true}); s.ImpliedSNI {
				ps = append(ps, &impliedSNI{p, auth})
			} else {
				ps = append(ps, p)
			}
		case "connect", "connect-h2":
			if name == "connect-h2" {
				carrier = &h2.Protocol{Auth: auth, Intermediary: front, CurrentVia: via, Delegate: l.builder.delegate()}
				ps = append(ps, carrier)
				continue
			}
			ps = append(ps, &connect.Protocol{Auth: auth, Intermediary: front, CurrentVia: via, Delegate: l.builder.delegate()})
		case "http":
			ps = append(ps, &connect.HTTP{Protocol: connect.Protocol{Auth: auth, Intermediary: front, CurrentVia: via}, PAC: l.builder.autoConfig})
		case "connect-udp":
			extended = append(extended, l.builder.connectUDP(auth, front))
		case "hbone":
			ps = append(ps, &hbone.Protocol{CurrentVia: via, Delegate: l.builder.delegate()})
		case "socks5":
			ps = append(ps, &socks5.Protocol{Verify: auth.password, Off: auth.Off})
		case "postgres":
			ps = append(ps, &postgres.Protocol{TLS: &sni.Protocol{Refusal: refusal(s), Nameless: true}})
		case "proxy":
			if inside {
				ps = append(ps, &proxyproto.Inner{Caller: l.builder.believed().caller})
				continue
			}
			ps = append(ps, &proxyproto.Protocol{})
		case reverse.PoolProtocolName:
			ps = append(ps, new(reverse.PoolProtocol))
		case capture.ProtocolName:
			ps = append(ps, l.captured())
		case "ssh":
			p := &ssh.Protocol{Sessions: l.builder.Sessions}
			if err := useSSH(p, s.SSH); err != nil {
				return nil, err
			}
			ps = append(ps, p)
		case "websocket":
			sockets = &ws.Protocol{Path: s.WebSocket.Path, Hosts: s.WebSocket.Hosts, Origins: s.WebSocket.Origins, Auth: auth, Intermediary: front, CurrentVia: via}
			ps = append(ps, sockets)
		default:
			return nil, fmt.Errorf("unknown protocol %q", name)
		}
	}
	if sockets != nil {
		extended = append(extended, sockets)
	}
	if carrier != nil {
		carrier.Extended = extended
	}
	return ps, nil
}

// autoConfig returns the PAC file for clients of a proxy: with the names of the table.
func (b *Builder) autoConfig(proxy string) []byte {
	var names []tunnel.Pattern
	if b.Table != nil {
		names = slices.AppendSeq(names, b.Table().Patterns())
	}
	return connect.AutoConfig(proxy, names)
}

// connHeader returns the header that connections begin with, nil for none.
func connHeader(s *registry.ListenerSettings) tunnel.ConnHeader {
	if len(s.ProxyProtocol) == 0 {
		return nil
	}
	return &proxyproto.ConnHeader{From: s.ProxyProtocol}
}

// intermediary returns the load balancer in front; the zero value where there is none.
func intermediary(s *registry.ListenerSettings) connect.Intermediary {
	if s.LoadBalancer == nil {
		return connect.Intermediary{}
	}
	return connect.Intermediary{ClientField: s.LoadBalancer.ClientField, Hops: s.LoadBalancer.Hops, CredentialsField: s.LoadBalancer.CredentialsField}
}

// rank orders protocols by how much they take for theirs.
func rank(protocol string) int {
	if protocol == "connect" {
		return 1
	}
	return 0
}
