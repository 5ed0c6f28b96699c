package ssh

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"culvert.dev/connect"
	"culvert.dev/identity/sshkeys"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

func TestMain(m *testing.M) { testnet.GoroutinesEnd(m) }

// patience is how long anything in these tests may take.
const patience = time.Minute

// newKey returns a new key.
func newKey(t testing.TB) ssh.Signer {
	t.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	s, err := ssh.NewSignerFromKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// line returns a line of authorized_keys.
func line(options string, key ssh.PublicKey, name string) string {
	if options != "" {
		options += " "
	}
	text := string(ssh.MarshalAuthorizedKey(key))
	return options + text[:len(text)-1] + " " + name + "\n"
}

// authority returns what accepts the keys of lines.
func authority(t testing.TB, lines ...string) *sshkeys.Authority {
	t.Helper()
	all := ""
	for _, l := range lines {
		all += l
	}
	keys, mistakes := sshkeys.ParseAuthorizedKeys(all)
	if len(mistakes) > 0 {
		t.Fatalf("authorized_keys: %v", mistakes)
	}
	return &sshkeys.Authority{Keys: keys}
}

// newProtocol returns a Protocol that accepts the key of alice.
func newProtocol(t testing.TB, alice ssh.PublicKey, options string) *Protocol {
	t.Helper()
	p := &Protocol{}
	use(t, p, authority(t, line(options, alice, "alice")))
	return p
}

func use(t testing.TB, p *Protocol, a *sshkeys.Authority) {
	t.Helper()
	if err := p.Use(&Config{HostKeys: []ssh.Signer{newKey(t)}, Authority: a}); err != nil {
		t.Fatal(err)
	}
}

func serve(t testing.TB, routes tunnel.Resolver, protocols ...tunnel.Protocol) *tunneltest.Gateway {
	t.Helper()
	return tunneltest.Serve(t, tunneltest.Setup{Protocols: protocols, Resolver: routes})
}

// clientConfig returns that of a client with keys.
func clientConfig(user string, keys ...ssh.Signer) *ssh.ClientConfig {
	return &ssh.ClientConfig{User: user, Auth: []ssh.AuthMethod{ssh.PublicKeys(keys...)}, HostKeyCallback: ssh.InsecureIgnoreHostKey(), Timeout: patience}
}

// login returns a client that is let in.
func login(t testing.TB, addr string, keys ...ssh.Signer) *ssh.Client {
	t.Helper()
	c, err := ssh.Dial("tcp", addr, clientConfig("alice", keys...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// A dialer opens channels of one connection. Its streams are those of the server, the other
// way round.
type dialer struct {
	addr string
	key  ssh.Signer

	mu     sync.Mutex
	client *session
	open   func(kind string, data []byte) (ssh.Channel, <-chan *ssh.Request, error)
}

func newDialer(t testing.TB, addr string, key ssh.Signer) *dialer {
	d := &dialer{addr: addr, key: key}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func (d *dialer) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.client == nil {
		return nil
	}
	return d.client.conn.Close()
}

func (d *dialer) connect() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.client != nil {
		return nil
	}
	nc, err := net.Dial("tcp", d.addr)
	if err != nil {
		return err
	}
	s := &session{over: make(chan struct{}), streams: make(map[*stream]struct{})}
	s.conn = newConn(context.Background(), tunnel.NewConn(nc), s)
	s.conn.first = false
	c, channels, requests, err := ssh.NewClientConn(s.conn, d.addr, clientConfig("alice", d.key))
	if err != nil {
		return err
	}
	s.conn.letIn.Store(true)
	go ssh.DiscardRequests(requests)
	go func() {
		for nc := range channels {
			_ = nc.Reject(ssh.Prohibited, "no")
		}
		close(s.over)
	}()
	d.client, d.open = s, c.OpenChannel
	return nil
}

// DialContext implements tunnel.Dialer.
func (d *dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	a, err := connect.ParseDial(network, addr)
	if err != nil {
		return nil, err
	}
	if err := d.connect(); err != nil {
		return nil, err
	}
	host := a.Name.String()
	if a.Addr.IsValid() {
		host = a.Addr.String()
	}
	ch, requests, err := d.open("direct-tcpip", ssh.Marshal(directTCPIP{host, uint32(a.Port), "127.0.0.1", 1}))
	if err != nil {
		return nil, refusal(err)
	}
	st := newStream(d.client, ch)
	go func() {
		ssh.DiscardRequests(requests)
		st.peerClosed()
	}()
	return st, nil
}

// refusal returns the *tunnel.Error of a refused channel.
func refusal(err error) error {
	refused, ok := errors.AsType[*ssh.OpenChannelError](err)
	if !ok {
		return err
	}
	for _, r := range tunnel.Reasons() {
		if text := string(r) + ": "; len(refused.Message) > len(text) && refused.Message[:len(text)] == text {
			return tunnel.Refusef(r, "%s", refused.Message)
		}
	}
	return err
}
