package udp

import (
	"errors"
	"net"
	"time"

	"culvert.dev/tunnel"
)

// deliver takes a datagram of the client on. The caller holds mu, which
// deliver gives up.
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
		if k.seat.on == &s.sockets.answered {
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
		k.strikes++
		if a := k.answer; a != nil && len(b) > len(a) && k.strikes&(k.strikes-1) == 0 { // ever more rarely
			s.mu.Unlock()
			_ = k.d.wire.send(a, p.client.addr, p.client.local)
			return
		}
	}
	s.mu.Unlock()
}

// toService sends a datagram and counts it.
func (k *session) toService(p *path, sock *socket, b []byte) error {
	now := int64(time.Since(k.start))
	k.moved.Store(now)
	p.moved.Store(now)
	k.sent.Add(1)
	k.spoken.Store(true)
	if err := sock.send(b); err != nil {
		return err
	}
	k.in.Add(int64(len(b)))
	return nil
}

// pump takes the service's datagrams to the client until the socket is closed.
func (k *session) pump(p *path, sock *socket) {
	var soft int
	for {
		b, n, err := sock.receive()
		switch {
		case err == nil:
			soft = 0
			k.toClient(p, b[:n])
			buffers.Put(b)
			continue
		case errors.Is(err, net.ErrClosed):
			return
		}
		// A router that can't reach the service just now says so more softly
		// than its host, whose port is closed.
		if soft++; isRefused(err) || soft > 16 {
			k.lost(err)
			return
		}
	}
}

func (k *session) toClient(p *path, b []byte) {
	if k.opening != nil && len(b) > 0 && b[0]&0x80 != 0 && !k.heard(b) {
		defer k.end(tunnel.Unsupported, errors.New("the service speaks other versions of QUIC: the client may begin again"))
	}
	now := int64(time.Since(k.start))
	k.moved.Store(now)
	p.moved.Store(now)
	if k.d.wire.send(b, p.client.addr, p.client.local) != nil {
		return
	}
	out, in := k.out.Add(int64(len(b))), k.in.Load()
	if first := !k.answered.Swap(true); first && k.opening == nil {
		k.d.s.answered(k)
	}
	if k.opening != nil && !k.sure.Load() && k.convinced(b, in, out) {
		k.sure.Store(true)
		k.prove()
	}
}

// convinced reports whether a QUIC service that says b behaves as one that
// knows that its client hears it: it says a 1-RTT packet to a client that has
// written to its id, as the end of a handshake is (HANDSHAKE_DONE), it has said
// more than three times what it got (RFC 9000 section 8.1), or has answered in
// 1-RTT packets some times. What it repeats before that is its handshake, in
// long headers (RFC 9002 section 6.2.1). What the client writes can't be read
// and proves nothing by itself.
func (k *session) convinced(b []byte, in, out int64) bool {
	const enough = 3
	if isShort(b) && k.spoken.Swap(false) {
		k.turns.Add(1)
		if k.echoed.Load() {
			return true
		}
	}
	return out > 3*in || k.turns.Load() >= enough
}
