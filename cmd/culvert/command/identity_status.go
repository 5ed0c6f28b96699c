package command

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"culvert.dev/identity"
	"culvert.dev/identity/bundle"
	"culvert.dev/identity/enroll"
	"culvert.dev/identity/files"
	"culvert.dev/identity/spiffe"
)

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
	add("culvert_identity_problem", "1 where a source of keys and trust has a problem and its last ones are kept. source is key-file or trust-file, with the name of the key or trust, workload-api, with the name of a stream, bundle-endpoint, with a trust domain, or device, with the folder in which this device has joined.",
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
			if d := st.Device; d != nil {
				one("device", d.Dir, d.Problem)
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
		seen := map[string]bool{}
		for _, stream := range api.Streams {
			if stream.Problem != "" && !seen[stream.Problem] {
				seen[stream.Problem] = true
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
	printDevice(line, s.Device)
	if b := s.ServeBundle; b != nil {
		problem := ""
		if b.Problem != "" {
			problem = ": " + b.Problem
		}
		line("bundle", "served at %s%s%s", cmp.Or(b.Address, "no address"), b.Path, problem)
	}
}

// printDevice prints how the certificate is that this device has by joining.
func printDevice(line func(what, format string, args ...any), d *enroll.RenewalStatus) {
	if d == nil {
		return
	}
	problem := ""
	if d.Problem != "" {
		problem = "not renewed for " + humanSeconds(time.Since(d.Since).Seconds()) + ": " + d.Problem
	}
	line("device", "%s: %s", cmp.Or(d.Device, d.Dir), joinSet(d.ID, of(d.Gateway), expires("expires in", "expired", d.Expires), expires("renewed in", "to be renewed since", d.Renew), problem))
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

// An identityStatus is what keys and trust there are, and how their sources are.
type identityStatus struct {
	Keys        []credentialStatus  `json:"keys,omitempty"`  // those with a problem first, and then what ends first; 100 at most
	Trust       []credentialStatus  `json:"trust,omitempty"` // likewise
	MoreKeys    int                 `json:"moreKeys,omitempty"`
	MoreTrust   int                 `json:"moreTrust,omitempty"`
	WorkloadAPI *spiffe.Status      `json:"workloadAPI,omitempty"`
	Bundles     []bundle.Status     `json:"bundles,omitempty"` // of other trust domains
	ServeBundle *bundleServerStatus `json:"serveBundle,omitempty"`

	Device *enroll.RenewalStatus `json:"device,omitempty"` // that has joined with a token
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
	if s.renewer != nil {
		st := s.renewer.of.Status()
		out.Device = &st
	}
	all := s.credentials()
	out.Keys, out.MoreKeys = mostUrgent(all[identity.KindKey])
	out.Trust, out.MoreTrust = mostUrgent(all[identity.KindTrust])
	if len(out.Keys)+len(out.Trust) == 0 && s.agent == nil && s.bundles == nil && s.server == nil && s.renewer == nil {
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
