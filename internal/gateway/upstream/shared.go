package upstream

import (
	"crypto/sha256"
	"fmt"
	"runtime"
	"sync"
	"weak"
)

// shared keeps one value for equal settings, for as long as anyone uses it.
type shared[T any] struct {
	mu    sync.Mutex // guards byKey
	byKey map[[sha256.Size]byte]weak.Pointer[T]
}

// get returns the value for settings, made by create where there is none. The settings
// may have secrets: no more is kept of them than a hash.
func (s *shared[T]) get(create func() (*T, error), settings ...any) (*T, error) {
	return s.getByKey(sha256.Sum256(fmt.Appendf(nil, "%q", settings)), create)
}

// getByKey is get for settings whose hash is key.
func (s *shared[T]) getByKey(key [sha256.Size]byte, create func() (*T, error)) (*T, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v := s.byKey[key].Value(); v != nil {
		return v, nil
	}
	v, err := create()
	if err != nil {
		return nil, err
	}
	if s.byKey == nil {
		s.byKey = make(map[[sha256.Size]byte]weak.Pointer[T])
	}
	s.byKey[key] = weak.Make(v)
	runtime.AddCleanup(v, s.forget, key)
	return v, nil
}

// forget drops the entry of a value that nobody uses.
func (s *shared[T]) forget(key [sha256.Size]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byKey[key].Value() == nil {
		delete(s.byKey, key)
	}
}

// all returns the values that anyone uses.
func (s *shared[T]) all() []*T {
	s.mu.Lock()
	defer s.mu.Unlock()
	values := make([]*T, 0, len(s.byKey))
	for _, p := range s.byKey {
		if v := p.Value(); v != nil {
			values = append(values, v)
		}
	}
	return values
}
