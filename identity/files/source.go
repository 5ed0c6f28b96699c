// Package files keeps keys and trust of an identity.Store by files, which it follows: it is
// enough to replace them.
//
//	src := &files.Source{Store: store, Log: log}
//	src.Configure(files.Config{
//		Keys:  map[string]files.Pair{"edge": {CertificateFile: "/etc/culvert/edge.pem", KeyFile: "/etc/culvert/edge.key"}},
//		Trust: map[string]files.CAs{"corp.example": {TrustDomain: "corp.example", CAFile: "/etc/culvert/corp.pem"}},
//	})
//	err := src.Run(ctx)
//
// Files that are missing, written in part, or do not belong together change nothing: the
// last ones that could be used stay, and the log says so once.
//
// The package is not stable yet.
package files

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"culvert.dev/identity"
	"culvert.dev/internal/background"
	"culvert.dev/internal/filewatch"
)

const (
	maxFile = 4 << 20  // bytes of a certificate with its chain, of a key, and of CAs
	maxList = 32 << 20 // bytes of revocation lists

	// retry is how often files that cannot be used are read again, though nothing says
	// that they have changed: what was in the way may have been something else.
	retry = 30 * time.Second

	// mostLines is how many changes are logged one by one, of those at one time.
	mostLines = 20
)

// A Config says which keys and trust of the Store a Source keeps, by their names.
type Config struct {
	Keys  map[string]Pair
	Trust map[string]CAs
}

// A Pair names the files of a key, in PEM.
type Pair struct {
	CertificateFile string // the certificate, and what it was signed by
	KeyFile         string // its private key
}

// A CAs names the files of a bundle.
type CAs struct {
	TrustDomain string // that the CAs speak for; "" for none, so that they can't vouch for SPIFFE ids
	CAFile      string // in PEM
	CRLFile     string // revocation lists of these CAs, in PEM or DER; "" for none
}

// A Source keeps keys and trust of Store by files. Its exported fields are set before its
// first use. It is safe for concurrent use.
type Source struct {
	Store *identity.Store
	Log   *slog.Logger // nil discards

	once sync.Once
	wake chan struct{} // has room for one: there is something to read

	pass sync.Mutex // is held while files are read and what they have is set

	mu      sync.Mutex // guards what follows; entries are changed with pass held as well
	entries map[entryName]*entry
	byFile  map[string][]*entry
	bad     int // entries with a problem
}

// An entryName is the name of an entry of the Store.
type entryName struct{ kind, name string }

// An entry is a key or trust.
type entry struct {
	entryName
	pair Pair
	cas  CAs

	sum [sha256.Size]byte // of what was set last, and of whether anything was

	// Guarded by Source.mu.
	problem string
	updated time.Time // when it was set last
}

// A Status says how the files of a key or of trust are.
type Status struct {
	Kind    string // identity.KindKey or identity.KindTrust
	Name    string // in the Store
	Files   []string
	Updated time.Time // when what they contain was taken up last; zero for never
	Problem string    // why what they contain now is not used; "" if it is
}

func (e *entry) files() []string {
	all := []string{e.pair.CertificateFile, e.pair.KeyFile, e.cas.CAFile, e.cas.CRLFile}
	return slices.DeleteFunc(all, func(s string) bool { return s == "" })
}

func (s *Source) init() { s.once.Do(func() { s.wake = make(chan struct{}, 1) }) }

// Configure says which keys and trust to keep, from now on, and reads the files of those
// that are new. A name that is no longer among them keeps what it has, and is not touched
// again.
func (s *Source) Configure(c Config) {
	s.init()
	s.pass.Lock()
	defer s.pass.Unlock()
	var fresh []*entry
	next := make(map[entryName]*entry, len(c.Keys)+len(c.Trust))
	add := func(e *entry) {
		if old := s.entries[e.entryName]; old != nil {
			if old.pair == e.pair && old.cas == e.cas {
				next[e.entryName] = old
				return
			}
			e.sum, e.updated = old.sum, old.updated
		}
		next[e.entryName] = e
		fresh = append(fresh, e)
	}
	for name, pair := range c.Keys {
		add(&entry{entryName: entryName{identity.KindKey, name}, pair: pair})
	}
	for name, cas := range c.Trust {
		add(&entry{entryName: entryName{identity.KindTrust, name}, cas: cas})
	}
	byFile := make(map[string][]*entry, 2*len(next))
	for _, e := range next {
		for _, f := range e.files() {
			byFile[f] = append(byFile[f], e)
		}
	}
	s.mu.Lock()
	s.entries, s.byFile = next, byFile
	s.mu.Unlock()
	s.read(fresh, false)
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run follows the files until ctx is done, and returns its error.
func (s *Source) Run(ctx context.Context) error {
	s.init()
	w := filewatch.New(s.Log)
	defer w.Close()
	for {
		names, bad := s.followed()
		w.Follow(names, true)
		var again *time.Timer
		if bad {
			again = time.AfterFunc(retry, func() {
				select {
				case s.wake <- struct{}{}:
				default:
				}
			})
		}
		changed, forced, err := w.Wait(ctx, s.wake)
		if again != nil {
			again.Stop()
		}
		if err != nil {
			return err
		}
		background.Do(func() { s.readChanged(changed, forced) })
	}
}

// followed returns the files, and whether some can't be used.
func (s *Source) followed() (names []string, bad bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	names = make([]string, 0, len(s.byFile))
	for f := range s.byFile {
		names = append(names, f)
	}
	return names, s.bad > 0
}

// readChanged reads what files are of, and, if asked for, what has a problem.
func (s *Source) readChanged(files []string, problems bool) {
	s.pass.Lock()
	defer s.pass.Unlock()
	s.mu.Lock()
	seen := make(map[*entry]bool, len(files))
	for _, f := range files {
		for _, e := range s.byFile[f] {
			seen[e] = true
		}
	}
	if problems {
		for _, e := range s.entries {
			if e.problem != "" {
				seen[e] = true
			}
		}
	}
	s.mu.Unlock()
	all := make([]*entry, 0, len(seen))
	for e := range seen {
		all = append(all, e)
	}
	s.read(all, true)
}

// read reads the files of entries and sets what has changed. It is called with s.pass held.
func (s *Source) read(all []*entry, said bool) {
	slices.SortFunc(all, func(a, b *entry) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.name, b.name))
	})
	changed := 0
	for _, e := range all {
		was := e.sum
		err := s.readOne(e)
		s.note(e, err)
		if e.sum == was || !said {
			continue
		}
		if changed++; changed <= mostLines {
			s.logger().Info("files have changed; using what they contain", e.kind, e.name)
		}
	}
	if more := changed - mostLines; more > 0 {
		s.logger().Info("files of more keys and trust have changed", "count", more)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bad = 0
	for _, e := range s.entries {
		if e.problem != "" {
			s.bad++
		}
	}
}

func (s *Source) logger() *slog.Logger {
	if s.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Log
}

// note notes whether the files of an entry can be used, and logs a change of that.
func (s *Source) note(e *entry, err error) {
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	s.mu.Lock()
	was := e.problem
	e.problem = problem
	s.mu.Unlock()
	switch log := s.logger(); {
	case problem == was:
	case problem == "":
		log.Info("files can be used again", e.kind, e.name)
	case e.sum == [sha256.Size]byte{}:
		log.Error("files cannot be used", e.kind, e.name, "err", problem)
	default:
		log.Warn("files cannot be used; keeping what they contained before", e.kind, e.name, "err", problem)
	}
}

// readOne reads the files of an entry, and sets it if they contain something else than
// before. A panic by what they contain is its error.
func (s *Source) readOne(e *entry) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
		if err != nil && e.sum == [sha256.Size]byte{} {
			e.remove(s.Store, err)
		}
	}()
	contents, sum, err := e.contents()
	if err != nil || sum == e.sum {
		return err
	}
	if e.kind == identity.KindKey {
		var pair *tls.Certificate
		if pair, err = identity.ParsePair(contents[0], contents[1]); err == nil {
			s.Store.Key(e.name).Set(pair)
		}
	} else {
		var b *identity.Bundle
		if b, err = identity.ParseBundle(e.cas.TrustDomain, contents[0], contents[1]); err == nil {
			s.Store.Trust(e.name).Set(b)
		}
	}
	if err != nil {
		return err
	}
	e.sum = sum
	s.mu.Lock()
	e.updated = time.Now()
	s.mu.Unlock()
	return nil
}

// remove says in the Store why there is nothing.
func (e *entry) remove(store *identity.Store, err error) {
	if e.kind == identity.KindKey {
		store.Key(e.name).Remove(err)
	} else {
		store.Trust(e.name).Remove(err)
	}
}

// contents returns what the two files of an entry contain, and a sum of that and of what it
// is used for.
func (e *entry) contents() (contents [2][]byte, sum [sha256.Size]byte, err error) {
	names := [2]string{e.pair.CertificateFile, e.pair.KeyFile}
	if e.kind == identity.KindTrust {
		names = [2]string{e.cas.CAFile, e.cas.CRLFile}
	}
	h := sha256.New()
	fmt.Fprintf(h, "%s %q", e.kind, e.cas.TrustDomain)
	for i, name := range names {
		if name == "" {
			continue
		}
		limit := int64(maxFile)
		if name == e.cas.CRLFile {
			limit = maxList
		}
		if contents[i], err = readFile(name, limit); err != nil {
			return contents, sum, err
		}
		part := sha256.Sum256(contents[i])
		h.Write(part[:])
	}
	h.Sum(sum[:0])
	return contents, sum, nil
}

// readFile returns the content of a regular file.
func readFile(name string, limit int64) ([]byte, error) {
	info, err := os.Stat(name) // before it is opened: to open a FIFO would wait
	if err != nil {
		return nil, plain(name, err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%q is not a regular file", name)
	}
	if info.Size() > limit {
		return nil, fmt.Errorf("%q has %d bytes, limit %d", name, info.Size(), limit)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, plain(name, err)
	}
	defer f.Close()
	b := make([]byte, 0, info.Size()+1)
	for {
		n, err := f.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		switch {
		case errors.Is(err, io.EOF) && len(b) == 0:
			return nil, fmt.Errorf("%q is empty", name)
		case errors.Is(err, io.EOF):
			return b, nil
		case err != nil:
			return nil, err
		case int64(len(b)) > limit:
			return nil, fmt.Errorf("%q has more than %d bytes", name, limit)
		case len(b) == cap(b):
			b = slices.Grow(b, 4096)
		}
	}
}

// plain returns the errors of missing and forbidden files in plain words.
func plain(name string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%q: no such file", name)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%q: permission denied", name)
	}
	return err
}

// Status says how the files are, sorted by kind and name.
func (s *Source) Status() []Status {
	s.mu.Lock()
	all := make([]Status, 0, len(s.entries))
	for _, e := range s.entries {
		all = append(all, Status{Kind: e.kind, Name: e.name, Files: e.files(), Updated: e.updated, Problem: e.problem})
	}
	s.mu.Unlock()
	slices.SortFunc(all, func(a, b Status) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
	})
	return all
}
