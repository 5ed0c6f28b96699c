package ssh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/ssh"

	"culvert.dev/connect/internal/mux"
	"culvert.dev/identity/sshkeys"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// Name is the name of the protocol in configuration, logs and metrics.
const Name = "ssh"

// Limits.
const (
	DefaultStreams   = 100              // channels of a connection at once
	DefaultKeepalive = 30 * time.Second // without a byte, until the client is asked for a sign of life
	DefaultSilence   = 300 * time.Millisecond

	loginTimeout   = time.Minute // until the client has shown its key: somebody may have to enter a passphrase
	maxAuthTries   = 6           // as sshd
	maxBeforeLogin = 256 << 10   // bytes
	maxVersion     = 255         // bytes of the line that a connection begins with, RFC 4253 section 4.2

	freeKeyExchanges = 10          // for each connection
	bytesPerExchange = 512 << 10   // that earn another one: clients renew their keys by gigabytes, or with "RekeyLimit 1M" by nearly 1 MiB
	timePerExchange  = time.Minute // that earns another one, too
	version          = "SSH-2.0-culvert"
	prefix           = "SSH-"
)

// The algorithms are fixed. The library does strict key exchange (CVE-2023-48795).
var (
	keyExchanges = []string{ssh.KeyExchangeMLKEM768X25519, ssh.KeyExchangeCurve25519, "curve25519-sha256@libssh.org", ssh.KeyExchangeDH16SHA512}
	macs         = []string{ssh.HMACSHA256ETM, ssh.HMACSHA512ETM}
	clientKeys   = []string{
		ssh.KeyAlgoED25519, ssh.KeyAlgoSKED25519, ssh.KeyAlgoSKECDSA256, ssh.KeyAlgoECDSA256, ssh.KeyAlgoECDSA384, ssh.KeyAlgoECDSA521,
		ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256,
	}
)

// A Config has the keys and rules of a Protocol. It is not changed once it is in use.
type Config struct {
	HostKeys  []ssh.Signer // at least one, of different types
	Authority *sshkeys.Authority
}

// NewConfig returns a Config.
func NewConfig(a *sshkeys.Authority, keys ...ssh.Signer) *Config { return &Config{keys, a} }

// A Protocol is the server side of SSH, and a tunnel.Protocol whose connections carry many
// tunnels. It serves nobody before Use.
//
// Its fields are not to be changed once it serves. It must not be copied.
type Protocol struct {
	Streams   int           // channels of a connection at once; 0 means DefaultStreams
	Keepalive time.Duration // 0 means DefaultKeepalive

	// Sessions registers the names that clients serve by "ssh -R". Nil refuses them.
	Sessions *reverse.Server

	config atomic.Pointer[Config]

	mu       sync.Mutex // guards what follows
	sessions map[*session]struct{}
	draining bool
}

var (
	_ tunnel.Protocol         = (*Protocol)(nil)
	_ tunnel.PreambleDetector = (*Protocol)(nil)
	_ tunnel.FirstSpeaker     = (*Protocol)(nil)
	_ tunnel.Drainer          = (*Protocol)(nil)
)

// Use has p serve by c from the next connection on. Clients that have logged in have what c gives
// their key from the next channel on, and lose names that it does not give any more.
func (p *Protocol) Use(c *Config) error {
	if len(c.HostKeys) == 0 {
		return errors.New("ssh: there is no host key")
	}
	p.config.Store(c)
	for _, s := range p.all() {
		s.served.recheck()
	}
	return nil
}

// all returns the connections whose clients have logged in.
func (p *Protocol) all() []*session {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]*session, 0, len(p.sessions))
	for s := range p.sessions {
		all = append(all, s)
	}
	return all
}

// Name returns "ssh".
func (*Protocol) Name() string { return Name }

// Silence implements tunnel.FirstSpeaker.
func (*Protocol) Silence() time.Duration { return DefaultSilence }

// Sniff implements tunnel.Protocol.
func (*Protocol) Sniff(b []byte) tunnel.Verdict {
	n := min(len(b), len(prefix))
	switch {
	case string(b[:n]) != prefix[:n]:
		return tunnel.No
	case n == len(prefix):
		return tunnel.Yes
	}
	return tunnel.More
}

// HasPreamble implements tunnel.PreambleDetector. From the client's first bytes on, a
// connection has a goroutine.
func (*Protocol) HasPreamble(b []byte) bool { return len(b) >= len(prefix) }

func (p *Protocol) streams() int {
	if p.Streams > 0 {
		return p.Streams
	}
	return DefaultStreams
}

func (p *Protocol) keepalive() time.Duration {
	if p.Keepalive > 0 {
		return p.Keepalive
	}
	return DefaultKeepalive
}

// Drain has connections refuse new channels and end with their last one. Later connections are ended
// at once. It does not wait.
func (p *Protocol) Drain() {
	p.mu.Lock()
	p.draining = true
	p.mu.Unlock()
	for _, s := range p.all() {
		s.drain()
	}
}

func (p *Protocol) track(s *session) {
	p.mu.Lock()
	if p.sessions == nil {
		p.sessions = make(map[*session]struct{})
	}
	p.sessions[s] = struct{}{}
	draining := p.draining
	p.mu.Unlock()
	if draining {
		s.drain()
	}
}

func (p *Protocol) untrack(s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.sessions, s)
}

// ServeConn implements tunnel.Protocol. It lets the client in and calls h for each channel of
// the type direct-tcpip, on a goroutine of its own. It returns when the connection has ended.
func (p *Protocol) ServeConn(ctx context.Context, c *tunnel.Conn, h tunnel.Handler) error {
	config := p.config.Load()
	if config == nil {
		_ = c.Abort()
		return tunnel.Refusef(tunnel.Internal, "ssh: the listener has no host key")
	}
	s := &session{p: p, h: h, c: c, over: make(chan struct{}), stopping: make(chan struct{}), streams: make(map[*stream]struct{})}
	s.conn = newConn(ctx, c, s)
	s.served.s = s
	ender, _ := h.(tunnel.PreambleEnder)
	if ender != nil {
		ender.ExtendPreamble(loginTimeout)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// A tunnel.Server closes c when ctx is done. Other callers may not.
	defer context.AfterFunc(ctx, func() {
		defer s.recovered()
		_ = c.Close()
	})()
	login := time.AfterFunc(loginTimeout, func() {
		defer s.recovered()
		s.end(tunnel.Refusef(tunnel.HelloTimeout, "ssh: the client has not shown its key in %s", loginTimeout))
	})
	defer login.Stop()

	var grant *sshkeys.Grant
	var denied []error
	server, channels, requests, err := ssh.NewServerConn(s.conn, p.server(s, config, &grant, &denied))
	if err != nil {
		return s.loginError(err, denied)
	}
	login.Stop()
	s.ssh, s.grant, s.under = server, grant, config.Authority
	s.conn.letIn.Store(true)
	if ender != nil {
		ender.EndPreamble()
	}
	p.track(s)
	defer p.untrack(s)
	func() {
		defer s.recovered()
		s.serve(ctx, channels, requests)
	}()
	s.mu.Lock()
	s.ended = true
	why := s.why
	s.mu.Unlock()
	close(s.over)
	_ = s.conn.Close()
	s.served.end(why)
	for range channels { // where serve has panicked
	}
	cancel()
	s.running.Wait()
	s.conn.account.Set(0)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := (*tunnel.Error)(nil); errors.As(s.why, &e) {
		return e
	}
	return nil
}

func newConn(ctx context.Context, c *tunnel.Conn, s *session) *conn {
	cn := &conn{Conn: c, c: c, s: s, first: true, account: tunnel.NewBufferAccount(ctx, true)}
	cn.remote = c.RemoteAddr()
	if source := c.NewRequest(Name).Source; source.IsValid() {
		cn.remote = net.TCPAddrFromAddrPort(source)
	}
	cn.last.Store(mux.Clock())
	return cn
}

// server returns the configuration of a connection. grant is set when the client has logged in, and
// denied collects why keys were not accepted.
func (p *Protocol) server(s *session, config *Config, grant **sshkeys.Grant, denied *[]error) *ssh.ServerConfig {
	from := s.c.NewRequest(Name).Source.Addr()
	c := &ssh.ServerConfig{
		Config:                  ssh.Config{KeyExchanges: keyExchanges, Ciphers: s.ciphers(), MACs: macs},
		PublicKeyAuthAlgorithms: clientKeys,
		MaxAuthTries:            maxAuthTries,
		ServerVersion:           version,
		PublicKeyCallback: func(meta ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
			g, err := config.Authority.Check(meta.User(), key, from, time.Now())
			if err != nil {
				if len(*denied) < maxAuthTries {
					*denied = append(*denied, err)
				}
				return nil, errors.New("not accepted")
			}
			return &ssh.Permissions{ExtraData: map[any]any{grantKey{}: g}}, nil
		},
		VerifiedPublicKeyCallback: func(_ ssh.ConnMetadata, _ ssh.PublicKey, perms *ssh.Permissions, _ string) (*ssh.Permissions, error) {
			g, ok := perms.ExtraData[grantKey{}].(*sshkeys.Grant)
			if !ok {
				return nil, errors.New("not accepted")
			}
			*grant = g
			return perms, nil
		},
	}
	exchanges := &exchanges{s: s, began: time.Now()}
	for _, key := range config.HostKeys {
		c.AddHostKey(limitExchanges(key, exchanges))
	}
	return c
}

type grantKey struct{}

// loginError returns why a client was not let in.
func (s *session) loginError(err error, denied []error) error {
	s.mu.Lock()
	why := s.why
	s.mu.Unlock()
	if e := (*tunnel.Error)(nil); errors.As(why, &e) || errors.As(err, &e) {
		return e
	}
	if _, ok := errors.AsType[*ssh.ServerAuthError](err); ok || len(denied) > 0 {
		if len(denied) == 0 {
			return tunnel.Refusef(tunnel.NoAuth, "ssh: the client has shown no key")
		}
		why := denied[0]
		for _, err := range denied[1:] {
			why = fmt.Errorf("%w; %w", why, err) // on one line, for the log
		}
		return tunnel.Refusef(tunnel.NoAuth, "ssh: no key of the client is accepted: %w", why)
	}
	if s.conn.failed.Load() || s.conn.arrived.Load() == 0 {
		return tunnel.PreambleErrorAfter(s.conn.arrived.Load(), err)
	}
	if strings.Contains(err.Error(), "no common algorithm") {
		return tunnel.Refusef(tunnel.Unsupported, "%w", err)
	}
	return tunnel.Refusef(tunnel.BadPreamble, "%w", err)
}

// exchanges limits how often a client may exchange keys: each exchange costs a signature.
type exchanges struct {
	s     *session
	began time.Time
	n     atomic.Int64
}

// A signer is a host key that signs for one connection.
type signer struct {
	ssh.MultiAlgorithmSigner
	exchanges *exchanges
}

// limitExchanges returns key for one connection, without SHA-1.
func limitExchanges(key ssh.Signer, e *exchanges) ssh.Signer {
	algorithms := []string{key.PublicKey().Type()}
	if algorithms[0] == ssh.KeyAlgoRSA {
		algorithms = []string{ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256}
	}
	as, ok := key.(ssh.AlgorithmSigner)
	if !ok {
		return key
	}
	multi, err := ssh.NewSignerWithAlgorithms(as, algorithms)
	if err != nil {
		return key
	}
	return &signer{multi, e}
}

// allow counts an exchange, and returns an error for one too many.
func (e *exchanges) allow() error {
	earned := freeKeyExchanges + (e.s.conn.arrived.Load()+e.s.conn.left.Load())/bytesPerExchange + int64(time.Since(e.began)/timePerExchange)
	if e.n.Add(1) > earned {
		err := tunnel.Refusef(tunnel.Flood, "ssh: the client exchanges keys again and again")
		e.s.end(err)
		return err
	}
	return nil
}

// Sign implements ssh.Signer.
func (s *signer) Sign(rand io.Reader, data []byte) (*ssh.Signature, error) {
	if err := s.exchanges.allow(); err != nil {
		return nil, err
	}
	return s.MultiAlgorithmSigner.Sign(rand, data)
}

// SignWithAlgorithm implements ssh.AlgorithmSigner.
func (s *signer) SignWithAlgorithm(rand io.Reader, data []byte, algorithm string) (*ssh.Signature, error) {
	if err := s.exchanges.allow(); err != nil {
		return nil, err
	}
	return s.MultiAlgorithmSigner.SignWithAlgorithm(rand, data, algorithm)
}
