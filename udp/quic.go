package udp

import (
	"encoding/binary"
	"slices"
	"time"

	"culvert.dev/tunnel"
)

const (
	maxIDLen   = 20 // bytes of a connection id, RFC 9000 section 17.2
	leastIDLen = 4  // of one that a moved client is known by: shorter ones are too easily met by chance
	maxIDs     = 8  // of a session; the client's first one, and the latest of the service's

	maxGuesses      = 4   // sessions that a datagram to an unknown id is tried with
	failedPerSecond = 100 // datagrams of one caller that may fit none of them
)

// readHeader reads what is the same in every version of QUIC, RFC 8999: a long
// header says its ids with their lengths, a short one begins with an id of a
// length that only the service knows.
func readHeader(b []byte) (version uint32, dcid, scid []byte, ok bool) {
	if len(b) < 7 || b[0]&0x80 == 0 {
		return 0, nil, nil, false
	}
	version = binary.BigEndian.Uint32(b[1:])
	at := 5
	for _, id := range []*[]byte{&dcid, &scid} {
		if at >= len(b) || at+1+int(b[at]) > len(b) {
			return 0, nil, nil, false
		}
		n := int(b[at])
		*id, at = b[at+1:at+1+n], at+1+n
	}
	return version, dcid, scid, true
}

// isShort reports whether b has a packet with a short header: by itself, or
// behind others of version 1 or 2 (RFC 9000 section 12.2, RFC 9369 section 3.2).
func isShort(b []byte) bool {
	for len(b) > 0 && b[0]&0x80 != 0 {
		version, _, _, ok := readHeader(b)
		if !ok || version != 1 && version != 0x6b3343cf {
			return false
		}
		kind := b[0] >> 4 & 3
		if version != 1 {
			kind = (kind + 3) % 4
		}
		at := 7 + int(b[5])
		at += int(b[at-1])
		switch kind {
		case 0: // an Initial has a token
			n, size := varint(b[at:])
			if at += size; size == 0 || n > uint64(len(b)-at) {
				return false
			}
			at += int(n)
		case 3: // a Retry is alone
			return false
		}
		n, size := varint(b[at:])
		if at += size; size == 0 || n > uint64(len(b)-at) {
			return false
		}
		b = b[at+int(n):]
	}
	return len(b) > 0 && b[0]&0x40 != 0
}

// varint reads a variable-length integer, RFC 9000 section 16. A size of 0
// means that it is cut off.
func varint(b []byte) (n uint64, size int) {
	if len(b) == 0 || len(b) < 1<<(b[0]>>6) {
		return 0, 0
	}
	size = 1 << (b[0] >> 6)
	n = uint64(b[0] & 0x3f)
	for _, c := range b[1:size] {
		n = n<<8 | uint64(c)
	}
	return n, size
}

// ids are the connection ids by which a session is known. They are guarded by
// the Server's mu.
type ids struct {
	first string   // what the client made up
	peer  string   // what the client wants to be called by
	known []string // those in byID
	heard string   // the service's own, of its handshake
	size  int      // of the service's; 0 before one is known
	none  bool     // the service has none
}

// add makes id, if it is nobody else's, one of k's. The oldest but the first
// makes room.
func (i *ids) add(k *session, id []byte) {
	d := k.d
	if len(id) == 0 || len(id) > maxIDLen || k.state == over {
		return
	}
	if _, taken := d.byID[string(id)]; taken {
		return
	}
	if len(i.known) == maxIDs {
		i.remove(d, i.known[1])
		i.known = slices.Delete(i.known, 1, 2)
	}
	d.byID[string(id)] = k
	d.idLen[len(id)]++
	i.known = append(i.known, string(id))
}

func (i *ids) remove(d *door, id string) {
	delete(d.byID, id)
	d.idLen[len(id)]--
}

func (i *ids) forget(k *session) {
	for _, id := range i.known {
		i.remove(k.d, id)
	}
	i.known = nil
}

// quic takes a datagram to its session, or begins one.
func (d *door) quic(b []byte, c client) {
	s := d.s
	version, dcid, scid, long := readHeader(b)
	if d.own(b, dcid, long, c) {
		return
	}
	s.mu.Lock()
	k, p := d.find(b, dcid, long, c)
	guessed := false
	if k == nil && long {
		k, p = d.guess(b, dcid, scid, c)
		guessed = k != nil // and the Opening has checked b: it can't do so twice
	}
	if k == nil {
		s.mu.Unlock()
		d.newcomer(b, c, dcid, scid, long)
		return
	}
	if long {
		if k.state == asking {
			s.mu.Unlock()
			k.ask(b)
			return
		}
		if !guessed && (k.state == opening || k.state == carried) {
			s.mu.Unlock()
			if !k.opening.Check(b) {
				s.dropped.Add(1)
				return
			}
			s.mu.Lock()
		}
		if version != 0 && k.ids.heard != "" && string(dcid) == k.ids.heard {
			k.echoed.Store(true)
		}
	}
	switch {
	case p != nil && !p.closed:
		k.deliver(p, b)
	case k.state == carried && k.ids.size > 0 && (!k.half || len(k.paths) < 2), k.state == local:
		k.move(c, b)
		isLocal := k.state == local
		s.mu.Unlock()
		if isLocal {
			d.ln.Local.push(b, c.addr)
		}
	default:
		s.mu.Unlock()
		s.dropped.Add(1)
	}
}

// own hands a datagram to an id of the Local's on.
func (d *door) own(b, id []byte, long bool, c client) bool {
	l := d.ln.Local
	if l == nil {
		return false
	}
	if !long && len(b) > LocalIDLen {
		id = b[1 : 1+LocalIDLen]
	}
	if !l.owns(id) {
		return false
	}
	d.s.mu.Lock()
	for _, p := range d.byAddr[c] {
		if k := p.session; k.state == local {
			k.echoed.Store(true)
			k.moved.Store(int64(time.Since(k.start)))
			break
		}
	}
	d.s.mu.Unlock()
	l.push(b, c.addr)
	return true
}

// find returns the session that a datagram is of, and its path if its client
// has one from where it came. The caller holds mu.
func (d *door) find(b, dcid []byte, long bool, c client) (*session, *path) {
	here := d.byAddr[c]
	if long {
		k := d.byID[string(dcid)]
		if k == nil && len(dcid) == 0 {
			for _, p := range here {
				if p.session.ids.none {
					return p.session, p
				}
			}
		}
		if k == nil {
			return nil, nil
		}
		for _, p := range here {
			if p.session == k {
				return k, p
			}
		}
		return k, nil
	}
	if len(b) < 2 {
		return nil, nil
	}
	// Of the sessions of this address first, so that no other one's id is
	// taken for part of a packet.
	for _, p := range here {
		for _, id := range p.session.ids.known {
			if len(b) > len(id) && string(b[1:1+len(id)]) == id {
				if id == p.session.ids.heard {
					p.session.echoed.Store(true)
				}
				return p.session, p
			}
		}
	}
	if len(here) == 0 {
		for n := maxIDLen; n >= leastIDLen; n-- {
			if d.idLen[n] > 0 && len(b) > n {
				if k := d.byID[string(b[1:1+n])]; k != nil {
					if string(b[1:1+n]) == k.ids.heard {
						k.echoed.Store(true)
					}
					return k, nil
				}
			}
		}
		return nil, nil
	}
	// An id we have not seen: the service gave it to the client in private.
	p := here[0]
	for _, q := range here[1:] {
		if q.session.state == local && p.session.state != local || q.session.state == p.session.state && q.age() < p.age() {
			p = q
		}
	}
	k := p.session
	switch n := k.ids.size; {
	case k.ids.none:
		k.echoed.Store(true)
	case len(here) == 1 && n >= leastIDLen && len(b) > n:
		k.ids.add(k, b[1:1+n]) // a service's ids have one length, nearly always
	}
	return k, p
}

// A caller is a client and the id that it wants to be called by.
type caller struct {
	client client
	id     string
}

// candidates are the sessions that a caller began last, oldest first, and how
// many datagrams that fit none of them it may still send.
type candidates struct {
	sessions []*session
	failures float64
	filled   time.Time
}

// candidate puts k where guess finds it. The oldest one makes room. The caller
// holds mu.
func (d *door) candidate(k *session) {
	who := caller{k.paths[0].client, k.ids.peer}
	all := d.callers[who]
	if all == nil {
		all = &candidates{failures: failedPerSecond, filled: k.start}
		d.callers[who] = all
	}
	if len(all.sessions) == maxGuesses {
		all.sessions[0].caller = caller{}
		all.sessions = slices.Delete(all.sessions, 0, 1)
	}
	all.sessions = append(all.sessions, k)
	k.caller = who
}

// noCandidate is its opposite. The caller holds mu.
func (d *door) noCandidate(k *session) {
	all := d.callers[k.caller]
	if all == nil {
		return
	}
	all.sessions = slices.DeleteFunc(all.sessions, func(s *session) bool { return s == k })
	if len(all.sessions) == 0 {
		delete(d.callers, k.caller)
	}
}

// guess returns the session of a client that uses an id, in a long header,
// that it was given in private: some take the first one there is, and finish
// the handshake with it. The client's own id says which session is meant, and
// what can be read of the datagram must be of it: the Opening has then checked
// it. Trying costs time on the listener's one reader, so only the newest
// sessions are tried, and a caller that fails too often is not tried for. The
// caller holds mu.
func (d *door) guess(b, dcid, scid []byte, c client) (*session, *path) {
	all := d.callers[caller{c, string(scid)}]
	if all == nil {
		return nil, nil
	}
	now := time.Now()
	all.failures = min(all.failures+now.Sub(all.filled).Seconds()*failedPerSecond, failedPerSecond)
	all.filled = now
	if all.failures < 1 {
		return nil, nil
	}
	for _, k := range slices.Backward(slices.Clone(all.sessions)) {
		if k.state != carried || k.ids.size != len(dcid) {
			continue
		}
		d.s.mu.Unlock()
		ok := k.opening.Check(b)
		d.s.mu.Lock()
		if !ok || k.state != carried {
			continue
		}
		for _, p := range k.paths {
			if p.client == c {
				k.ids.add(k, dcid)
				return k, p
			}
		}
	}
	all.failures--
	return nil, nil
}

// age is how long nothing was carried.
func (p *path) age() time.Duration {
	return time.Since(p.session.start) - time.Duration(p.moved.Load())
}

// newcomer takes a datagram of no session.
func (d *door) newcomer(b []byte, c client, dcid, scid []byte, long bool) {
	s := d.s
	if !long {
		if d.ln.Local != nil {
			d.ln.Local.push(b, c.addr) // who moved on purpose is known to him who gave out the ids
			return
		}
		d.drop(c, tunnel.Refusef(tunnel.BadPreamble, "%d bytes of no session we know, and no beginning of one", len(b)))
		return
	}
	o, req := d.ln.Open(), d.request(c)
	v, err := o.Ask(b, &req)
	switch {
	case v == tunnel.More && err != nil:
		return
	case v == tunnel.No && tunnel.ReasonOf(err) == tunnel.BadPreamble:
		if d.ln.Local != nil && len(dcid) <= maxIDLen {
			d.ln.Local.push(b, c.addr)
			return
		}
		d.drop(c, err)
		return
	case v == tunnel.No && tunnel.ReasonOf(err) == tunnel.Unsupported:
		d.drop(c, err)
		d.answer(o, err, c) // and he may begin again, with the same id
		return
	}
	s.mu.Lock()
	k, crowded, aerr := d.admit(c)
	if aerr != nil {
		s.mu.Unlock()
		d.drop(c, aerr)
		if v != tunnel.No {
			d.answer(o, aerr, c)
		}
		return
	}
	k.opening, k.req = o, req
	k.ids.first, k.ids.peer = string(dcid), string(scid)
	k.ids.add(k, dcid)
	d.candidate(k)
	switch v {
	case tunnel.More:
		k.hold(b)
		s.mu.Unlock()
	case tunnel.Yes:
		k.known(b)
	case tunnel.No:
		s.mu.Unlock()
		k.decline(err)
	}
	crowded.crowdedOut()
}

// answer tells one who comes to no session why.
func (d *door) answer(o Opening, err error, c client) {
	if d.ln.Silent {
		return
	}
	if a := o.Refuse(err); a != nil {
		_ = d.wire.send(a, c.addr, c.local)
	}
}

// ask takes a further datagram of a hello. Only the door's reader calls it.
func (k *session) ask(b []byte) {
	s := k.d.s
	req := k.req
	v, err := k.opening.Ask(b, &req)
	if v == tunnel.More && err != nil {
		s.dropped.Add(1)
		return
	}
	s.mu.Lock()
	if k.state != asking {
		s.mu.Unlock()
		return
	}
	switch v {
	case tunnel.More:
		k.hold(b)
		s.mu.Unlock()
	case tunnel.Yes:
		k.req = req
		k.known(b)
	case tunnel.No:
		s.mu.Unlock()
		k.decline(err)
	}
}

// known goes on with a session whose name is known. The caller holds mu, which
// known gives up.
func (k *session) known(b []byte) {
	d, s := k.d, k.d.s
	k.hold(b)
	if d.ln.Local == nil || d.ln.Own == nil || !d.ln.Own(k.req.Name) {
		crowded, err := k.begin()
		s.mu.Unlock()
		crowded.crowdedOut()
		if err != nil {
			k.decline(err)
		}
		return
	}
	k.state = local
	k.moved.Store(int64(time.Since(k.start)))
	c := k.paths[0].client
	d.answers[c.addr] = c
	waiting := k.release()
	s.mu.Unlock()
	for _, b := range waiting {
		d.ln.Local.push(b, c.addr)
	}
}

// heard takes note of a long header of the service's: of the id it wants to be
// called by. It is false for a Version Negotiation, after which the client
// begins again or gives up.
func (k *session) heard(b []byte) bool {
	version, _, scid, ok := readHeader(b)
	if !ok {
		return true
	}
	if version == 0 {
		return false
	}
	k.opening.Heard(b)
	s := k.d.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(scid) == 0 {
		k.ids.none = true
	} else {
		k.ids.heard, k.ids.size = string(scid), len(scid)
		k.ids.add(k, scid)
	}
	return true
}
