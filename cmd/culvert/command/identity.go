package command

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/identity"
	"culvert.dev/identity/bundle"
	"culvert.dev/identity/enroll"
	"culvert.dev/identity/files"
	"culvert.dev/identity/spiffe"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

// identities keep the keys and the trust of a gateway as its configuration says: those of
// files, of the Workload API and of bundle endpoints. They serve its own bundle, too.
type identities struct {
	store   *identity.Store
	sockets tunnel.Sockets
	log     *slog.Logger
	ctx     context.Context // of all that runs; its end is close's
	end     context.CancelFunc

	minting atomic.Pointer[spiffe.Source] // the agent, for those who must not wait for mu

	mu      sync.Mutex // guards what follows
	current *file.Identity
	files   *part[*files.Source]
	agent   *part[*spiffe.Source]
	bundles *part[*bundle.Source]
	server  *part[*bundleServer]
	renewer *part[*enroll.Renewer]
}

// A part runs until it is stopped.
type part[T any] struct {
	of   T
	stop func() // returns when it is over
}

// run starts f as a part.
func run[T any](ctx context.Context, of T, f func(context.Context) error) *part[T] {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = f(ctx) // it logs what fails
	}()
	return &part[T]{of, func() { cancel(); <-done }}
}

// checkIdentity returns an error if a gateway can't keep what c says. The loader has seen
// to all that it can know.
func checkIdentity(c *file.Identity) error {
	if c == nil {
		return nil
	}
	if c.SPIFFE != nil {
		if !spiffe.Supported {
			return usageError("use a program without that tag, or keys and trust of files", "identity.spiffe: this program was built with the tag nospiffe, without the Workload API")
		}
		if err := spiffe.CheckSocket(c.SPIFFE.Socket); err != nil {
			return fmt.Errorf("identity.spiffe: %w", err)
		}
	}
	_, err := endpoints(c)
	return err
}

// endpoints are the bundle endpoints of c.
func endpoints(c *file.Identity) (all []bundle.Endpoint, err error) {
	for name, t := range c.Trust {
		if t.Bundle == "" {
			continue
		}
		e := bundle.Endpoint{Name: name, TrustDomain: name, URL: t.Bundle, ID: t.EndpointID, StateFile: t.State}
		if t.EndpointCAs != "" {
			e.Roots = x509.NewCertPool()
			e.Roots.AppendCertsFromPEM([]byte(t.EndpointCAs))
		}
		if t.First != nil {
			if e.Bootstrap, err = bundle.Parse(name, t.First); err != nil {
				return nil, usageError("it is a JWK set, as the other domain's bundle endpoint serves it", "bundleFile of trust %q: %w", name, err)
			}
		}
		all = append(all, e)
	}
	return all, new(bundle.Source).Configure(all)
}

// newIdentities begins to keep what c says.
func newIdentities(ctx context.Context, c *file.Identity, sockets tunnel.Sockets, log *slog.Logger) (*identities, error) {
	s := &identities{store: new(identity.Store), sockets: sockets, log: log}
	s.ctx, s.end = context.WithCancel(context.WithoutCancel(ctx)) // tunnels that drain need keys, too
	if err := s.use(c); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// close ends all parts.
func (s *identities) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end()
	if s.files != nil {
		s.files.stop()
	}
	if s.server != nil {
		s.server.stop()
	}
	if s.agent != nil {
		s.agent.stop()
	}
	if s.bundles != nil {
		s.bundles.stop()
	}
	if s.renewer != nil {
		s.renewer.stop()
	}
}

// use keeps what c says from now on. Of an error, which is that of a listener that can't
// be opened, all but that listener is in force.
func (s *identities) use(c *file.Identity) error {
	if c == nil {
		c = &file.Identity{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.current
	if was == nil {
		was = &file.Identity{}
	}
	s.current = c
	delegates := make(map[string][]string)
	for name, t := range c.Trust {
		if domain := t.TrustDomain(name); domain != "" {
			delegates[domain] = t.Delegates
		}
	}
	s.store.SetDelegates(delegates)
	s.useFiles(was, c)
	s.useAgent(was, c)
	s.useBundles(c)
	s.renew(was.Joined, c.Joined)
	return s.serve(was.ServeBundle, c.ServeBundle)
}

// useFiles follows the files of c, and takes away what is no longer configured.
func (s *identities) useFiles(was, c *file.Identity) {
	for name := range was.Keys {
		if c.Keys[name] == nil {
			s.store.Key(name).Remove(identity.ErrNotConfigured)
		}
	}
	for name := range was.Trust {
		if c.Trust[name] == nil {
			s.store.Trust(name).Remove(identity.ErrNotConfigured)
		}
	}
	want := files.Config{Keys: map[string]files.Pair{}, Trust: map[string]files.CAs{}}
	for name, k := range c.Keys {
		if k.SPIFFE == "" {
			want.Keys[name] = files.Pair{CertificateFile: k.CertificateFile, KeyFile: k.KeyFile}
		}
	}
	for name, t := range c.Trust {
		if t.CAFile != "" {
			want.Trust[name] = files.CAs{TrustDomain: t.TrustDomain(name), CAFile: t.CAFile, CRLFile: t.CRLFile}
		}
	}
	if s.files == nil {
		if len(want.Keys)+len(want.Trust) == 0 {
			return
		}
		src := &files.Source{Store: s.store, Log: s.log}
		src.Configure(want)
		s.files = run(s.ctx, src, src.Run)
		return
	}
	s.files.of.Configure(want)
}

// useAgent follows the agent of c.
func (s *identities) useAgent(was, c *file.Identity) {
	if s.agent != nil && (c.SPIFFE == nil || c.SPIFFE.Socket != was.SPIFFE.Socket) {
		s.minting.Store(nil)
		s.agent.stop()
		s.agent = nil
	}
	if c.SPIFFE == nil {
		return
	}
	want := spiffe.Config{Keys: map[string]string{}, Trust: map[string]string{}}
	for name, k := range c.Keys {
		switch k.SPIFFE {
		case "":
		case file.DefaultSVID:
			want.Keys[name] = ""
		default:
			want.Keys[name] = k.SPIFFE
		}
	}
	for name, t := range c.Trust {
		if t.SPIFFE {
			want.Trust[name] = name
		}
	}
	if s.agent != nil {
		s.agent.of.Configure(want)
		return
	}
	src := &spiffe.Source{Store: s.store, Socket: c.SPIFFE.Socket, Log: s.log}
	src.Configure(want)
	s.agent = run(s.ctx, src, src.Run)
	s.minting.Store(src)
}

// renew renews the certificate of the device that has joined in a folder.
func (s *identities) renew(was, folder string) {
	if folder == was && s.renewer != nil {
		return
	}
	if s.renewer != nil {
		s.renewer.stop()
		s.renewer = nil
	}
	if folder != "" {
		r := &enroll.Renewer{Dir: folder, Dialer: s.sockets.Dialer(), Log: s.log}
		s.renewer = run(s.ctx, r, r.Run)
	}
}

// jwtSVID returns a JWT-SVID of the agent: that of the SPIFFE id, or of its default for "".
func (s *identities) jwtSVID(ctx context.Context, id string, audience ...string) (string, error) {
	src := s.minting.Load()
	if src == nil {
		return "", errors.New("identity.spiffe is no longer in the configuration")
	}
	return src.Token(ctx, id, audience...)
}

// useBundles asks the bundle endpoints of c.
func (s *identities) useBundles(c *file.Identity) {
	all, err := endpoints(c)
	if err != nil { // settings has found it right
		s.log.Error("cannot use the bundle endpoints", "err", err.Error())
		return
	}
	if s.bundles == nil {
		if len(all) == 0 {
			return
		}
		src := &bundle.Source{Store: s.store, Dial: s.sockets.DialContext, Log: s.log}
		s.bundles = run(s.ctx, src, src.Run)
	}
	_ = s.bundles.of.Configure(all) // endpoints has checked them
}

// serve serves the bundle as c says.
func (s *identities) serve(was, c *file.ServeBundle) error {
	if was != nil && c != nil && *was == *c {
		return nil
	}
	if s.server != nil {
		s.server.stop()
		s.server = nil
	}
	if c == nil {
		return nil
	}
	server := &bundleServer{
		Server:  bundle.Server{Handler: &bundle.Handler{Trust: s.store.Trust(c.Trust)}, Path: c.Path, Key: s.store.Key(c.Key)},
		address: c.Listener, log: s.log,
	}
	err := server.listen(s.ctx)
	s.server = run(s.ctx, server, server.run)
	return err
}

// A bundleServer is a bundle endpoint whose listener is opened again and again until that
// works.
type bundleServer struct {
	bundle.Server
	address string
	log     *slog.Logger

	mu      sync.Mutex // guards what follows
	ln      net.Listener
	problem string
}

// listen opens the listener.
func (s *bundleServer) listen(ctx context.Context) error {
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", s.address)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ln, s.problem = ln, ""
	if err != nil {
		s.problem = err.Error()
	}
	return err
}

func (s *bundleServer) listener() net.Listener {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ln
}

// run serves until ctx is done.
func (s *bundleServer) run(ctx context.Context) error {
	const again = 5 * time.Second
	for ln := s.listener(); ; ln = s.listener() {
		if ln != nil {
			if err := s.Serve(ctx, ln); err != nil && ctx.Err() == nil {
				s.log.Error("bundle endpoint ended; it is opened again", "address", s.address, "err", err.Error(), "retry_in", again)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(again):
		}
		if err := s.listen(ctx); err == nil {
			s.log.Info("bundle endpoint is open", "address", s.address)
		}
	}
}
