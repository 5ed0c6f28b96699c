package udp

import (
	"errors"
	"time"

	"culvert.dev/tunnel"
)

// deliver handles a datagram of the client. The caller holds mu, which deliver
// unlocks.
func (k *session) deliver(p *path, b []byte) {
	s := k.d.s
	switch k.state {
	case asking, opening:
		k.hold(b)
	case carried:
		sock := p.sock
		if sock == nil {
			p.hold(b)
			break
		}
		if k.socketSlot.on == &s.sockets.answered {
			k.rank(&s.sockets.again)
		}
		s.mu.Unlock()
		if err := k.toService(p, sock, b); err != nil {
			k.lost(err)
		}
		return
	case local:
		s.mu.Unlock()
		k.moved.Store(int64(time.Since(k.start)))
		k.d.ln.Local.push(b, p.client.addr)
		return
	case refused:
		k.sinceRefusal++
		if a := k.answer; a != nil && len(b) > len(a) && k.sinceRefusal&(k.sinceRefusal-1) == 0 { // ever more rarely
			s.mu.Unlock()
			_ = k.d.wire.send(a, p.client.addr, p.client.local)
			return
		}
	}
	s.mu.Unlock()
}

// toService sends a datagram and counts it.
func (k *session) toService(p *path, sock tunnel.DatagramConn, b []byte) error {
	now := int64(time.Since(k.start))
	k.moved.Store(now)
	p.moved.Store(now)
	k.sent.Add(1)
	k.clientSentLast.Store(true)
	if err := sock.SendDatagram(b); err != nil {
		return err
	}
	k.in.Add(int64(len(b)))
	return nil
}

// pump sends the service's datagrams to the client until sock is closed.
func (k *session) pump(p *path, sock tunnel.DatagramConn) {
	k.lost(sock.ReceiveDatagrams(func(b []byte) {
		defer k.recovered() // it may be a goroutine of many sessions
		k.toClient(p, b)
	}))
}

func (k *session) toClient(p *path, b []byte) {
	if k.opening != nil && len(b) > 0 && b[0]&0x80 != 0 && !k.heard(b) {
		defer k.end(tunnel.Unsupported, errors.New("the service speaks other versions of QUIC: the client may begin again"))
	}
	now := int64(time.Since(k.start))
	k.moved.Store(now)
	p.moved.Store(now)
	// Noted before it is sent: the client may ask again at once.
	if first := !k.answered.Swap(true); first && k.opening == nil {
		k.d.s.answered(k)
	}
	if k.d.wire.send(b, p.client.addr, p.client.local) != nil {
		return
	}
	out, in := k.out.Add(int64(len(b))), k.in.Load()
	if k.opening != nil && !k.answersProve.Load() && k.provesClient(b, in, out) {
		k.answersProve.Store(true)
		k.prove()
	}
}

// provesClient reports whether a QUIC service that sends b knows that its client
// receives what it sends: it sends a 1-RTT packet to a client that uses its id, as at
// the end of a handshake (HANDSHAKE_DONE), it has sent more than three times what it
// got (RFC 9000 section 8.1), or has answered in 1-RTT packets several times. What it
// repeats before that is its handshake, in long headers (RFC 9002 section 6.2.1). The
// client's own packets cannot be read and prove nothing.
func (k *session) provesClient(b []byte, in, out int64) bool {
	const enough = 3
	if isShort(b) && k.clientSentLast.Swap(false) {
		k.shortAnswers.Add(1)
		if k.usesServiceID.Load() {
			return true
		}
	}
	return out > 3*in || k.shortAnswers.Load() >= enough
}
