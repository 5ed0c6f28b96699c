package reverse

import (
	"encoding/json"
	"fmt"

	"culvert.dev/tunnel"
)

// A list of names that is too long for one line is sent in several. The first line of a connector has
// the names that fit, which are served at once. Control lines of the kind register then have the
// whole list: each but the last one has More set.

// Limits of lists of names.
const (
	maxListBytes  = 1 << 20  // of one session, as listBytes counts
	maxOwnerLists = 64 << 20 // of all sessions of an owner
)

// listBytes is how many bytes a list takes at the gateway.
func listBytes(list []Registration) (n int) {
	for i := range list {
		n += list[i].bytes()
	}
	return n
}

func (r *Registration) bytes() int {
	n := 64 + len(r.Name.Suffix.String()) + len(r.Group)
	for _, id := range r.Allow {
		n += 16 + len(id)
	}
	return n
}

// sendable returns those of list that a session may have. The others are refused by the
// connector itself: a gateway would end a session for them.
func sendable(list []Registration) (fit []Registration, over []Result) {
	size := 0
	for i := range list {
		r := &list[i]
		refuse := func(reason tunnel.Reason, err error) {
			over = append(over, Result{Name: r.Name, Port: r.Port, Reason: reason, Error: err.Error()})
		}
		switch n := r.bytes(); {
		case len(fit) == maxNamesOf:
			refuse(tunnel.Overload, errNames)
		case r.lineBytes() > maxLine/2:
			refuse(tunnel.TooLarge, fmt.Errorf("reverse: a name and its allow are more than %d bytes", maxLine/2))
		case size+n > maxListBytes:
			refuse(tunnel.TooLarge, errList)
		default:
			size += n
			fit = append(fit, *r)
		}
	}
	return fit, over
}

// lineBytes is how long r is in a line, with a comma.
func (r *Registration) lineBytes() int {
	b, err := json.Marshal(r)
	if err != nil {
		return maxLine // so that it is refused
	}
	return len(b) + 1
}

// cut returns the beginning of list that fits into a line with so many other bytes, and the rest.
func cut(list []Registration, other int) (part, rest []Registration) {
	size := other + 64 // for the key and brackets
	for i := range list {
		if size += list[i].lineBytes(); size >= maxLine {
			return list[:i], list[i:]
		}
	}
	return list, nil
}

// errList is the error for a list that is too long.
var errList = fmt.Errorf("reverse: a list of names has more than %d bytes, the limit of a session", maxListBytes)

// sendList sends a whole list of names.
func (s *controlStream) sendList(list []Registration) error {
	for {
		part, rest := cut(list, 64)
		if err := s.send(control{Kind: kindRegister, Register: part, More: len(rest) > 0}); err != nil || len(rest) == 0 {
			return err
		}
		list = rest
	}
}

// hold sets how many bytes the lists of x have, and charges them to the owner.
func (x *serverSession) hold(bytes int) error {
	s, owner := x.server, x.req.Peer.ID
	s.mu.Lock()
	defer s.mu.Unlock()
	switch all := s.lists[owner] - x.listBytes + bytes; {
	case bytes > maxListBytes:
		return tunnel.Refusef(tunnel.TooLarge, "%w", errList)
	case all > maxOwnerLists && bytes > x.listBytes:
		return tunnel.Refusef(tunnel.Overload, "reverse: the lists of names of all sessions of the owner have %d bytes, the limit", maxOwnerLists)
	default:
		if s.lists == nil {
			s.lists = map[string]int{}
		}
		x.listBytes, s.lists[owner] = bytes, all
	}
	return nil
}

// unhold ends the charge for a session that has ended. The caller holds mu.
func (s *Server) unhold(x *serverSession) {
	owner := x.req.Peer.ID
	left := s.lists[owner] - x.listBytes
	if x.listBytes = 0; left > 0 {
		s.lists[owner] = left
	} else {
		delete(s.lists, owner)
	}
}

// takeList takes a line of names, and returns the list once it is complete. Only the goroutine
// that reads the control stream calls it.
func (x *serverSession) takeList(c *control) (list []Registration, complete bool, err error) {
	if len(x.parts) == 0 && !c.More {
		return c.Register, true, x.hold(listBytes(c.Register))
	}
	x.parts = append(x.parts, c.Register...)
	x.mu.Lock()
	standing := listBytes(x.asked)
	x.mu.Unlock()
	switch n := listBytes(x.parts); {
	case len(x.parts) > maxNamesOf:
		return nil, false, tunnel.Refusef(tunnel.TooLarge, "reverse: a list of more than %d names comes in several lines", maxNamesOf)
	case n > maxListBytes:
		return nil, false, tunnel.Refusef(tunnel.TooLarge, "%w", errList)
	case c.More:
		return nil, false, x.hold(min(n+standing, maxListBytes))
	}
	list, x.parts = x.parts, nil
	return list, true, x.hold(listBytes(list))
}
