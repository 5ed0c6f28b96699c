package command

import (
	"log/slog"
	"sync"

	"culvert.dev/identity"
	"culvert.dev/registry/file"
)

// credentials keep the keys and CAs of the files that listeners, hops and services of the
// configuration name themselves. The table has their names.
type credentials struct {
	store *identity.Store
	log   *slog.Logger

	mu   sync.Mutex // guards what follows
	now  file.Credentials
	gone file.Credentials // that the configuration before had: the table may have them for a while
}

// use keeps what c has from now on. What has not changed keeps its generation.
func (s *credentials) use(c file.Credentials) {
	s.mu.Lock()
	defer s.mu.Unlock()
	was, gone := s.now, s.gone
	s.now, s.gone = c, file.Credentials{Keys: map[string]file.KeyPair{}, Trust: map[string]file.CAs{}}
	for name, pair := range c.Keys {
		if was.Keys[name] == pair {
			continue
		}
		x, err := pair.X509()
		if err != nil { // the loader has seen that it is one
			s.log.Error("cannot use a certificate", "key", name, "err", err.Error())
			continue
		}
		s.store.Key(name).Set(&x)
	}
	for name, cas := range c.Trust {
		if was.Trust[name] == cas {
			continue
		}
		roots, err := identity.ParseCertificates(cas.PEM)
		if err != nil {
			s.log.Error("cannot use CA certificates", "trust", name, "err", err.Error())
			continue
		}
		s.store.Trust(name).Set(&identity.Bundle{TrustDomain: cas.TrustDomain, Roots: roots})
	}
	for name, pair := range was.Keys {
		if _, ok := c.Keys[name]; !ok {
			s.gone.Keys[name] = pair
		}
	}
	for name, cas := range was.Trust {
		if _, ok := c.Trust[name]; !ok {
			s.gone.Trust[name] = cas
		}
	}
	for name := range gone.Keys {
		if _, ok := c.Keys[name]; !ok {
			s.store.Key(name).Remove(identity.ErrUnused)
		}
	}
	for name := range gone.Trust {
		if _, ok := c.Trust[name]; !ok {
			s.store.Trust(name).Remove(identity.ErrUnused)
		}
	}
}
