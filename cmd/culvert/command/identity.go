package command

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/identity"
	"culvert.dev/identity/bundle"
	"culvert.dev/identity/files"
	"culvert.dev/identity/spiffe"
	"culvert.dev/registry/file"
)

// identities keep the keys and the trust of a gateway as its configuration says: those of
// files, of the Workload API and of bundle endpoints. They serve its own bundle, too.
type identities struct {
	store *identity.Store
	log   *slog.Logger
	ctx   context.Context // of all that runs; its end is close's
	end   context.CancelFunc

	minting atomic.Pointer[spiffe.Source] // the agent, for those who must not wait for mu

	mu      sync.Mutex // guards what follows
	current *file.Identity
	files   *part[*files.Source]
	agent   *part[*spiffe.Source]
	bundles *part[*bundle.Source]
	server  *part[*bundleServer]
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
func newIdentities(ctx context.Context, c *file.Identity, log *slog.Logger) (*identities, error) {
	s := &identities{store: new(identity.Store), log: log}
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
		src := &bundle.Source{Store: s.store, Log: s.log}
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

// An identityStatus is what keys and trust there are, and how their sources are.
type identityStatus struct {
	Keys        []credentialStatus  `json:"keys,omitempty"`  // those with a problem first, and then what ends first; 100 at most
	Trust       []credentialStatus  `json:"trust,omitempty"` // likewise
	MoreKeys    int                 `json:"moreKeys,omitempty"`
	MoreTrust   int                 `json:"moreTrust,omitempty"`
	WorkloadAPI *spiffe.Status      `json:"workloadAPI,omitempty"`
	Bundles     []bundle.Status     `json:"bundles,omitempty"` // of other trust domains
	ServeBundle *bundleServerStatus `json:"serveBundle,omitempty"`
}

// A credentialStatus is a key or trust of the Store.
type credentialStatus struct {
	Name       string    `json:"name"`
	Source     string    `json:"source,omitempty"`     // files, a URL, or "Workload API"
	ID         string    `json:"id,omitempty"`         // of a key: its SPIFFE ID, DNS name or subject
	CAs        int       `json:"cas,omitempty"`        // of trust
	NotAfter   time.Time `json:"notAfter,omitzero"`    // when it expires: of trust the last of its CAs, or, without a trust domain, the first name of CAs
	ListsUntil time.Time `json:"listsUntil,omitzero"`  // when the first revocation list is out of date
	Generation uint64    `json:"generation,omitempty"` // grows with each change
	Problem    string    `json:"problem,omitempty"`    // why there is nothing, or why the last is kept
}

// A bundleServerStatus is how the bundle endpoint of this gateway is.
type bundleServerStatus struct {
	Address string `json:"address"` // "" where it is not open
	Path    string `json:"path"`
	Problem string `json:"problem,omitempty"`
}

// status says what there is, and how the sources are; nil where there is nothing.
func (s *identities) status() *identityStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out identityStatus
	if s.agent != nil {
		st := s.agent.of.Status()
		out.WorkloadAPI = &st
	}
	if s.bundles != nil {
		out.Bundles = s.bundles.of.Status()
	}
	if s.server != nil {
		out.ServeBundle = s.server.of.status()
	}
	all := s.credentials()
	out.Keys, out.MoreKeys = mostUrgent(all[identity.KindKey])
	out.Trust, out.MoreTrust = mostUrgent(all[identity.KindTrust])
	if len(out.Keys)+len(out.Trust) == 0 && s.agent == nil && s.bundles == nil && s.server == nil {
		return nil
	}
	return &out
}

// credentials returns the keys and trust of the Store by kind. It is called with s.mu held.
func (s *identities) credentials() map[string][]credentialStatus {
	problems := map[[2]string]string{}
	if s.files != nil {
		for _, f := range s.files.of.Status() {
			problems[[2]string{f.Kind, f.Name}] = f.Problem
		}
	}
	all := map[string][]credentialStatus{}
	for _, e := range s.store.Entries() {
		if errors.Is(e.Err, identity.ErrNotConfigured) || errors.Is(e.Err, identity.ErrUnused) {
			continue
		}
		c := credentialStatus{Name: e.Name, Source: s.sourceOf(e.Kind, e.Name), Generation: e.Generation, Problem: problems[[2]string{e.Kind, e.Name}]}
		if e.Err != nil && c.Problem == "" {
			c.Problem = e.Err.Error()
		}
		for _, end := range e.Ends {
			if end.Kind == identity.KindList {
				c.ListsUntil = firstOf(c.ListsUntil, end.NotAfter)
				continue
			}
			c.NotAfter = firstOf(c.NotAfter, end.NotAfter)
			if e.Kind == identity.KindKey {
				c.ID = end.Of
			}
		}
		if e.Kind == identity.KindTrust && e.Err == nil {
			if b, err := s.store.Trust(e.Name).Bundle(); err == nil {
				c.CAs = len(b.Roots)
			}
		}
		all[e.Kind] = append(all[e.Kind], c)
	}
	return all
}

// sourceOf says where a key or trust comes from; "" for another source than those of the
// configuration.
func (s *identities) sourceOf(kind, name string) string {
	if s.current == nil {
		return ""
	}
	const agent = "Workload API"
	k, t := s.current.Keys[name], s.current.Trust[name]
	switch {
	case kind == identity.KindKey && k != nil && k.SPIFFE != "", kind == identity.KindTrust && t != nil && t.SPIFFE:
		return agent
	case kind == identity.KindKey && k != nil:
		return k.CertificateFile
	case kind == identity.KindTrust && t != nil:
		return cmp.Or(t.Bundle, t.CAFile)
	}
	return ""
}

func firstOf(a, b time.Time) time.Time {
	if a.IsZero() || b.Before(a) {
		return b
	}
	return a
}

// mostUrgent returns those with a problem and what ends first, and how many are left out.
func mostUrgent(all []credentialStatus) (first []credentialStatus, more int) {
	const most = 100
	slices.SortStableFunc(all, func(a, b credentialStatus) int {
		if (a.Problem == "") != (b.Problem == "") {
			return cmp.Compare(b.Problem, a.Problem)
		}
		return cmp.Or(a.NotAfter.Compare(b.NotAfter), cmp.Compare(a.Name, b.Name))
	})
	return all[:min(len(all), most)], max(len(all)-most, 0)
}

func (s *bundleServer) status() *bundleServerStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := &bundleServerStatus{Path: s.Path, Problem: s.problem}
	if s.ln != nil {
		st.Address = s.ln.Addr().String()
	}
	if _, err := s.Handler.Trust.Bundle(); err != nil && st.Problem == "" {
		st.Problem = err.Error()
	}
	if _, err := s.Key.Certificate(); err != nil && st.Problem == "" {
		st.Problem = err.Error()
	}
	return st
}

// addGauges adds gauges, as GaugeSet of package metrics does.
type addGauges = func(name, help string, labels []string, read func(yield func(labels []string, v float64)))

// fileStatus says how the files of keys and trust are.
func (s *identities) fileStatus() []files.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.files == nil {
		return nil
	}
	return s.files.of.Status()
}

// metrics adds gauges.
func (s *identities) metrics(add addGauges) {
	add("culvert_identity_problem", "1 where a source of keys and trust has a problem and its last ones are kept. source is key-file or trust-file, with the name of the key or trust, workload-api, with the name of a stream, or bundle-endpoint, with a trust domain.",
		[]string{"source", "name"}, func(yield func([]string, float64)) {
			one := func(source, name, problem string) {
				v := 0.0
				if problem != "" {
					v = 1
				}
				yield([]string{source, name}, v)
			}
			for _, f := range s.fileStatus() {
				one(f.Kind+"-file", f.Name, f.Problem)
			}
			st := s.status()
			if st == nil {
				return
			}
			if api := st.WorkloadAPI; api != nil {
				for _, stream := range api.Streams {
					one("workload-api", stream.Name, stream.Problem)
				}
			}
			for _, b := range st.Bundles {
				one("bundle-endpoint", b.TrustDomain, b.Problem)
			}
		})
}

// printIdentity prints how the sources of keys and trust are.
func printIdentity(line func(what, format string, args ...any), s *identityStatus) {
	if s == nil {
		return
	}
	for i := range s.Keys {
		c := &s.Keys[i]
		line("key", "%s: %s", c.Name, joinSet(c.ID, of(c.Source), expires("expires in", "expired", c.NotAfter), generation(c), c.Problem))
	}
	for i := range s.Trust {
		c := &s.Trust[i]
		cas := ""
		if c.CAs > 0 {
			cas = plural(c.CAs, "CA")
		}
		line("trust", "%s: %s", c.Name, joinSet(cas, of(c.Source), expires("expires in", "expired", c.NotAfter),
			expires("revocation lists end in", "revocation lists ended", c.ListsUntil), generation(c), c.Problem))
	}
	for _, more := range []struct {
		what string
		n    int
	}{{"key", s.MoreKeys}, {"trust", s.MoreTrust}} {
		if more.n > 0 {
			line(more.what, "and %d more, which last longer", more.n)
		}
	}
	if api := s.WorkloadAPI; api != nil {
		ids := make([]string, len(api.SVIDs))
		for i, v := range api.SVIDs {
			ids[i] = v.ID
		}
		line("spiffe", "%s: SVIDs %s; bundles %s", api.Socket, orNothing(ids), orNothing(api.Bundles))
		said := map[string]bool{}
		for _, stream := range api.Streams {
			if stream.Problem != "" && !said[stream.Problem] {
				said[stream.Problem] = true
				line("spiffe", "%s", stream.Problem)
			}
		}
	}
	for _, b := range s.Bundles {
		text := "not yet"
		if !b.Updated.IsZero() {
			text = humanSeconds(time.Since(b.Updated).Seconds()) + " ago"
		}
		if b.Problem != "" {
			text += ": " + b.Problem
		}
		line("bundle", "of %s from %s, %s", b.TrustDomain, b.URL, text)
	}
	if b := s.ServeBundle; b != nil {
		problem := ""
		if b.Problem != "" {
			problem = ": " + b.Problem
		}
		line("bundle", "served at %s%s%s", cmp.Or(b.Address, "no address"), b.Path, problem)
	}
}

// joinSet joins the parts that are there.
func joinSet(parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), ", ")
}

func of(source string) string {
	if source == "" {
		return ""
	}
	return "of " + source
}

func generation(c *credentialStatus) string { return fmt.Sprintf("generation %d", c.Generation) }

// expires says when something ends, or ended; "" where nobody knows.
func expires(later, before string, at time.Time) string {
	left := time.Until(at)
	switch {
	case at.IsZero():
		return ""
	case left < 0:
		return before + " " + humanSeconds(-left.Seconds()) + " ago"
	}
	return later + " " + humanSeconds(left.Seconds())
}

func orNothing(list []string) string { return cmp.Or(strings.Join(list, ", "), "none") }
