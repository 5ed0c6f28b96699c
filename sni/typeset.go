package sni

import (
	"math"
	"slices"
)

// A typeSet is the set of extension types seen. It grows with what the client
// has sent, so that a short hello does not cost much memory nor a long one,
// of 16,000 extensions, much time.
type typeSet struct {
	low  uint64        // types below 64: most of what real clients send
	list []uint16      // others
	bits *[1024]uint64 // all others, when they no longer fit the list
}

const maxList = 1024 // types to search one by one

// add adds t and reports whether it was there.
func (s *typeSet) add(t uint16) bool {
	if t < 64 {
		was := s.low&(1<<t) != 0
		s.low |= 1 << t
		return was
	}
	if s.bits == nil {
		if slices.Contains(s.list, t) {
			return true
		}
		if len(s.list) < maxList {
			if len(s.list) == cap(s.list) {
				s.list = append(make([]uint16, 0, max(16, 4*cap(s.list))), s.list...)
			}
			s.list = append(s.list, t)
			return false
		}
		s.bits = new([(math.MaxUint16 + 1) / 64]uint64)
		for _, have := range s.list {
			s.bits[have/64] |= 1 << (have % 64)
		}
		s.list = nil
	}
	was := s.bits[t/64]&(1<<(t%64)) != 0
	s.bits[t/64] |= 1 << (t % 64)
	return was
}
