package file

import (
	"context"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"

	"culvert.dev/internal/background"
	"culvert.dev/internal/filewatch"
	"culvert.dev/registry"
)

// A Source is a configuration file as a registry.Source: it sends the file's
// services and networks at first and whenever they change. The zero value but
// for Path is ready; a Source must not be copied and is run once.
//
// The file may be rewritten, renamed over, or reached through symbolic links
// that are swapped, as a Kubernetes ConfigMap does. A file that is missing or
// wrong changes nothing, and is complained of once; the registry is told that
// what it has may be old.
type Source struct {
	Path string

	// Load reads Path, and returns current itself where it would be the same.
	// Nil means Reload; ReloadRoutes is the other choice.
	Load func(path string, current *Config) (*Config, error)

	// OnConfig is told of every configuration that was accepted, the first one
	// included, before its services take effect. It is called by Run, and returns
	// the sources that the configuration asks for in the place of those of the one
	// before it, or nil where they stay. If OnConfig is nil, parts that need a
	// restart to take effect are logged.
	OnConfig func(*Config) *registry.Group

	// OnError is told of every file that was refused: Errors with all its
	// mistakes, or what the file system said. It is called by Run. May be nil.
	OnError func(error)

	// Log is told of the same. Nil discards.
	Log *slog.Logger

	once   sync.Once
	reload chan struct{}
}

func (s *Source) init() { s.once.Do(func() { s.reload = make(chan struct{}, 1) }) }

// Reload makes Run read the file now, as on SIGHUP. It does not wait.
func (s *Source) Reload() {
	s.init()
	select {
	case s.reload <- struct{}{}:
	default: // one is on its way already
	}
}

// Run implements registry.Source. It returns when ctx is done.
func (s *Source) Run(ctx context.Context, updates chan<- registry.Update) error {
	s.init()
	log := s.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	w := filewatch.New(log)
	defer w.Close()

	var current *Config
	var sent registry.Snapshot
	var lost error // the file can't be read, so that current may be old
	// The file is followed before it is read, so that no later change is missed.
	w.Follow(s.files(nil), false)
	for forced := true; ; {
		var next *Config
		var err error
		background.Do(func() { next, err = s.read(current, forced, log) })
		update := registry.Update{Source: s.Path, Err: err}
		sameText := false // and only other files have changed
		if next != nil {
			sameText = current != nil && next.text == current.text && next.text != (digest{})
			if s.OnConfig != nil {
				update.Group = s.OnConfig(next)
			} else if current != nil {
				if parts := current.RestartNeeded(next); len(parts) > 0 {
					log.Warn("configuration change needs a restart", "file", s.Path, "changed", joinKeys(parts))
				}
			}
			current = next
			w.Follow(s.files(current), true) // it may name other files than before
		}
		if next != nil || err != nil || lost != nil {
			if err == nil {
				if next != nil {
					snapshot := next.Snapshot()
					if sameText {
						snapshot = kept(sent, snapshot)
					}
					sent = snapshot
				}
				update.Snapshot = sent // which is what it was, where the file is back
			}
			select {
			case updates <- update:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		lost = err
		if _, forced, err = w.Wait(ctx, s.reload); err != nil {
			return err
		}
	}
}

// kept returns next with the parts of before that are equal in their place, by which the
// registry sees that they are the same: renewed certificates, say, make no new table.
func kept(before, next registry.Snapshot) registry.Snapshot {
	next.Services = keptSlice(before.Services, next.Services)
	next.Networks = keptSlice(before.Networks, next.Networks)
	next.Listeners = keptSlice(before.Listeners, next.Listeners)
	next.Policies = keptSlice(before.Policies, next.Policies)
	if reflect.DeepEqual(before.GatewayTransport, next.GatewayTransport) {
		next.GatewayTransport = before.GatewayTransport
	}
	if reflect.DeepEqual(before.Mesh, next.Mesh) {
		next.Mesh = before.Mesh
	}
	return next
}

func keptSlice[T any](before, next []T) []T {
	if slices.EqualFunc(before, next, func(a, b T) bool { return reflect.DeepEqual(a, b) }) {
		return before
	}
	return next
}

func joinKeys(list []Change) string {
	keys := make([]string, len(list))
	for i, c := range list {
		keys[i] = c.Key
	}
	return strings.Join(keys, ", ")
}

// files returns every file the configuration is made of.
func (s *Source) files(c *Config) []string {
	if c == nil {
		return []string{s.Path}
	}
	return c.files
}

// read loads the file and returns what is new, nil for nothing.
func (s *Source) read(current *Config, forced bool, log *slog.Logger) (*Config, error) {
	load := s.Load
	if load == nil {
		load = Reload
	}
	next, err := load(s.Path, current)
	switch {
	case err != nil:
		if s.OnError != nil {
			s.OnError(err)
		}
		log.Error("configuration refused; keeping the previous one", "file", s.Path, "err", err)
		return nil, err
	case next == current:
		if forced {
			log.Info("configuration unchanged", "file", s.Path)
		}
		return nil, nil
	}
	log.Info("configuration read", "file", s.Path, "services", len(next.Services))
	return next, nil
}
