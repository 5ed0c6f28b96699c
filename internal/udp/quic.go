package udp

import (
	"encoding/binary"
	"slices"
	"time"

	"culvert.dev/tunnel"
)

const (
	maxIDLen = 20 // bytes of a connection id, RFC 9000 section 17.2
	minIDLen = 4  // of one that a moved client is known by: shorter ones match too easily by chance
	maxIDs   = 8  // of a session; the client's first one, and the latest of the service's

	maxGuesses      = 4   // sessions that are tried for a datagram to an unknown id
	failedPerSecond = 100 // datagrams of one caller that may fit none of them
)

// readHeader reads what is the same in every version of QUIC, RFC 8999: a long header
// has its ids with their lengths, a short one begins with an id of a length that only
// the service knows.
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
	first string   // the one that the client made up for the service
	peer  string   // the client's own
	known []string // those in byID
	heard string   // the service's own, of its handshake
	size  int      // of the service's; 0 before one is known
	none  bool     // the service has none
}

// add adds id, if no other session has it, to those of k. The oldest but the first
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

func (i *ids) remove(d *activeListener, id string) {
	delete(d.byID, id)
	d.idLen[len(id)]--
}

func (i *ids) forget(k *session) {
	for _, id := range i.known {
		i.remove(k.d, id)
	}
	i.known = nil
}

// quic handles a datagram of QUIC: it delivers it to its session, or begins one.
func (d *activeListener) quic(b []byte, c client) {
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
		guessed = k != nil // the Opening has checked b, which it cannot do twice
	}
	if k == nil {
		s.mu.Unlock()
		d.beginSession(b, c, dcid, scid, long)
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
			k.usesServiceID.Store(true)
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

// own passes a datagram to one of the Local's ids to it, and reports whether it was
// one.
func (d *activeListener) own(b, id []byte, long bool, c client) bool {
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
			k.usesServiceID.Store(true)
			k.moved.Store(int64(time.Since(k.start)))
			break
		}
	}
	d.s.mu.Unlock()
	l.push(b, c.addr)
	return true
}

// find returns the session of a datagram, and its path if the client is known at this
// address. The caller holds mu.
func (d *activeListener) find(b, dcid []byte, long bool, c client) (*session, *path) {
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
	// The sessions of this address come first, so that no part of a packet is taken
	// for another session's id.
	for _, p := range here {
		for _, id := range p.session.ids.known {
			if len(b) > len(id) && string(b[1:1+len(id)]) == id {
				if id == p.session.ids.heard {
					p.session.usesServiceID.Store(true)
				}
				return p.session, p
			}
		}
	}
	if len(here) == 0 {
		for n := maxIDLen; n >= minIDLen; n-- {
			if d.idLen[n] > 0 && len(b) > n {
				if k := d.byID[string(b[1:1+n])]; k != nil {
					if string(b[1:1+n]) == k.ids.heard {
						k.usesServiceID.Store(true)
					}
					return k, nil
				}
			}
		}
		return nil, nil
	}
	// The id is unknown: the service gave it to the client under encryption.
	p := here[0]
	for _, q := range here[1:] {
		if q.session.state == local && p.session.state != local || q.session.state == p.session.state && q.age() < p.age() {
			p = q
		}
	}
	k := p.session
	switch n := k.ids.size; {
	case k.ids.none:
		k.usesServiceID.Store(true)
	case len(here) == 1 && n >= minIDLen && len(b) > n:
		k.ids.add(k, b[1:1+n]) // a service's ids have one length, nearly always
	}
	return k, p
}

// A caller is a client and its own connection id.
type caller struct {
	client client
	id     string
}

// candidates are the sessions that a caller began last, oldest first, and how many
// datagrams that fit none of them it may still send.
type candidates struct {
	sessions []*session
	failures float64
	filled   time.Time
}

// addCandidate puts k where guess finds it. The oldest one makes room. The caller
// holds mu.
func (d *activeListener) addCandidate(k *session) {
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

// removeCandidate undoes addCandidate. The caller holds mu.
func (d *activeListener) removeCandidate(k *session) {
	all := d.callers[k.caller]
	if all == nil {
		return
	}
	all.sessions = slices.DeleteFunc(all.sessions, func(s *session) bool { return s == k })
	if len(all.sessions) == 0 {
		delete(d.callers, k.caller)
	}
}

// guess returns the session of a client that uses, in a long header, an id that it got
// under encryption: some clients finish the handshake with the first one they get.
// The client's own id selects the candidates, and the Opening checks whether the
// datagram can be of one. Trying takes time of the listener's one reader, so only
// the newest sessions are tried, and none for a caller that fails too often. The
// caller holds mu.
func (d *activeListener) guess(b, dcid, scid []byte, c client) (*session, *path) {
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

// age returns the time since a datagram was last carried.
func (p *path) age() time.Duration {
	return time.Since(p.session.start) - time.Duration(p.moved.Load())
}

// beginSession handles a datagram of no session.
func (d *activeListener) beginSession(b []byte, c client, dcid, scid []byte, long bool) {
	s := d.s
	if !long {
		if d.ln.Local != nil {
			d.ln.Local.push(b, c.addr) // it may know the id of a client that has moved
			return
		}
		d.drop(c, tunnel.Refusef(tunnel.BadPreamble, "a datagram of %d bytes that belongs to no session and begins none", len(b)))
		return
	}
	o, req := d.ln.Open(), d.request(c)
	v, err := o.ReadHello(b, &req)
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
		d.answer(o, err, c) // and the client may begin again, with the same id
		return
	}
	s.mu.Lock()
	k, evicted, aerr := d.admit(c)
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
	d.addCandidate(k)
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
	evicted.evict()
}

// answer sends a client without a session the reason.
func (d *activeListener) answer(o Opening, err error, c client) {
	if d.ln.Silent {
		return
	}
	if a := o.Refuse(err); a != nil {
		_ = d.wire.send(a, c.addr, c.local)
	}
}

// ask reads a further datagram of a hello. Only the listener's reader calls it.
func (k *session) ask(b []byte) {
	s := k.d.s
	req := k.req
	v, err := k.opening.ReadHello(b, &req)
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

// known begins a session whose name is known. The caller holds mu, which known
// unlocks.
func (k *session) known(b []byte) {
	d, s := k.d, k.d.s
	k.hold(b)
	if d.ln.Local == nil || d.ln.Own == nil || !d.ln.Own(k.req.Name) {
		evicted, err := k.begin()
		s.mu.Unlock()
		evicted.evict()
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

// heard reads a long header of the service for the service's id. It returns false for
// a Version Negotiation, after which the client begins again or gives up.
func (k *session) heard(b []byte) bool {
	version, _, scid, ok := readHeader(b)
	if !ok {
		return true
	}
	if version == 0 {
		return false
	}
	k.opening.ServiceDatagram(b)
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
