//go:build amd64 || arm64

package tunnel_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// FuzzLoop carries one tunnel and does to its two ends what the input says:
// the first byte is the tunnel's circumstances, and every other one an act.
// Then it lets the tunnel end, and compares with the model: which bytes each
// end got, how the tunnel ended for it, what was counted, and that nothing of
// it is left.
//
// The sockets are real, with buffers so small that back-pressure is the rule.
// One thread does everything but the loop's own work, and waits only for what
// the model says must come.
func FuzzLoop(f *testing.F) {
	rig := newLoopRig(f)
	for _, s := range loopSeeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) == 0 || len(in) > 64 {
			return
		}
		if err := rig.play(t.Context(), in); err != nil {
			t.Errorf("%s: %v", describe(in), err)
		}
	})
}

// An act is one byte: what is done in the lowest three bits, the side that
// does it in the next, and how much in the others.
const (
	actWrite = iota // as much as the socket takes, up to so many bytes
	actRead         // what has come, up to so many bytes
	actAwait        // wait for a byte that must come
	actFin
	actClose
	actReset
	actAbort // the Relay is told to abort the tunnel
	actWait  // for the tunnel's limit to pass, or else a moment

	byService = 1 << 3
)

var (
	actNames = [...]string{"write", "read", "await", "fin", "close", "reset", "abort", "wait"}
	amounts  = [...]int{1, 2, 31, 128, 129, 1000, 4 << 10, 16 << 10, 32 << 10, 64<<10 - 1, 64 << 10, 64<<10 + 1, 128 << 10, 256 << 10, 512 << 10, 1 << 20}
)

func amount(act byte) int { return amounts[act>>4] }

// The circumstances, two bits each: the sockets' buffers (see newLoopRig), the
// limit, and the bytes that were read before the tunnel stood; one bit is free,
// and the last is for no pipes but one.
const (
	howBuffers = 3

	howLimit  = 3 << 2
	limitIdle = 2 << 2
	limitHalf = 3 << 2

	howEarly  = 3 << 4
	earlyFew  = 1 << 4
	earlyMany = 2 << 4
	earlyBoth = 3 << 4

	onePipe = 1 << 7
)

// brief is the limit of tunnels that have one.
const brief = 2 * time.Millisecond

func describe(in []byte) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%q is circumstances %#02x", in, in[0])
	for _, a := range in[1:] {
		fmt.Fprintf(&b, ", %s %s %d", [2]string{"client", "service"}[a&byService/byService], actNames[a&7], amount(a))
	}
	return b.String()
}

// Schedules that a random one seldom hits upon; testdata has those that were
// found.
var loopSeeds = []string{
	"\x00",
	"\x00\x50\x58\x52\x5a\x03\x0b", // a word each way
	"\x01\xf0\xf8\x07\xf1\xf9\xf0\xf8\x07\xf1\xf9\x03\x0b", // bulk both ways, blocked
	"\x01\xf0\x03\x07\xf8\x0b\xf9\xf1",                     // ends behind backlogs
	"\x01\xf0\xf0\x07\x05",                                 // a reset behind a backlog
	"\x01\xf0\xf0\x07\x0d",                                 // and from the side that is blocked
	"\x01\xf0\xf8\x07\x06",                                 // an abort while both are blocked
	"\x00\x58\x52\x0c\xf7\x01\xf7\x01\x20",                 // a goodbye to nobody
	"\x00\x58\x52\x0c\xf7\x01\xf7\x01\xa0",                 // and one too long for it
	"\x08\x07", "\x0c\x03\x0a\x07", "\x09\xf0\x07",
	"\x21\x07\xf9\xf0\x03", "\x31\xf8\x07\x0c", "\xa1\xf0\xf8\xf9\xf1\xf0\xf8",
}

// A player is one outer end of the tunnel.
type player struct {
	*party
	fd         int
	send, want []byte // the whole stream each way
}

// A game is one schedule being played.
type game struct {
	history
	rig     *loopRig
	relay   *tunnel.Relay
	players [2]player
	ended   chan tunnel.End
	told    bool // ended has spoken
	began   time.Time
}

func (rig *loopRig) play(ctx context.Context, in []byte) error {
	g := &game{rig: rig, relay: rig.relays[in[0]/onePipe], ended: make(chan tunnel.End, 1)}
	if rig.goroutines == 0 { // starts what stays
		rig.goroutines = 1
		for _, first := range []string{"\x01\xf0\x03\x0b", "\x81\xf0\x03\x0b"} {
			if err := rig.play(ctx, []byte(first)); err != nil {
				return err
			}
		}
		rig.goroutines, rig.fds = runtime.NumGoroutine(), rig.descriptors()
	}
	if err := g.begin(in[0]); err != nil {
		return err
	}
	defer g.closeAll()
	for _, a := range in[1:] {
		if err := g.act(ctx, a); err != nil {
			return fmt.Errorf("%s: %w: %v", actNames[a&7], err, g)
		}
	}
	if err := g.finish(); err != nil {
		return fmt.Errorf("at the end: %w: %v", err, g)
	}
	if err := errors.Join(g.judge(), g.blame()); err != nil {
		return err
	}
	g.closeAll()
	return rig.leftovers()
}

// begin connects both ends and has them carried.
func (g *game) begin(how byte) error {
	g.rig.runs++
	buffers := [4][2]int{{}, {8 << 10, 256 << 10}, {8 << 10, 8 << 10}, {8 << 10, 256 << 10}}[how&howBuffers]
	var inner [2]net.Conn
	for i := range g.players {
		fd, conn, err := g.rig.connect(int(how&howBuffers), buffers)
		if err != nil {
			return err
		}
		g.players[i] = player{party: &g.sides[i], fd: fd, send: g.rig.data[i], want: g.rig.data[1-i]}
		inner[i] = conn
	}
	var early [2]int
	switch how & howEarly {
	case earlyFew:
		early[0] = 5
	case earlyMany:
		early[0] = 70000
	case earlyBoth:
		early = [2]int{300000, 300000}
	}
	for i, n := range early {
		if n > 0 {
			inner[i] = &wrapper{inner[i], g.players[i].send[:n]}
			g.sides[i].sent = n
		}
	}
	t := tunnel.Tunnel{Client: inner[0], Server: inner[1], IdleTimeout: -1, HalfClosedTimeout: -1, Ended: func(e tunnel.End) { g.ended <- e }}
	switch how & howLimit {
	case limitIdle:
		t.IdleTimeout, g.limit = brief, tunnel.Idle
	case limitHalf:
		t.HalfClosedTimeout, g.limit = brief, tunnel.HalfClosed
	}
	g.began = time.Now()
	g.relay.Carry(t)
	return nil
}

// act does one act, if the side still can.
func (g *game) act(ctx context.Context, a byte) error {
	i := int(a & byService / byService)
	p := &g.players[i]
	switch {
	case a&7 == actAbort:
		g.ordered = true
		g.relay.Abort(ctx, tunnel.Killed, 0)
		return nil
	case a&7 == actWait:
		return g.wait(amount(a))
	case p.gone():
		return nil
	}
	switch a & 7 {
	case actWrite:
		return g.write(i, amount(a))
	case actRead:
		return p.read(g.rig.buf[:amount(a)], syscall.MSG_DONTWAIT)
	case actAwait:
		if g.sides[1-i].sent > p.got && !g.over() && g.limit == "" && !p.cut {
			return p.read(g.rig.buf[:amount(a)], 0)
		}
	case actFin:
		return p.end()
	case actClose:
		p.moot = p.fin && g.sides[1-i].fin
		p.fin, p.closed = true, true
		return p.close()
	case actReset:
		p.moot = p.fin && g.sides[1-i].fin
		p.reset = true
		return p.close()
	}
	return nil
}

func (g *game) write(i, n int) error {
	p, from := &g.players[i], &g.sides[1-i]
	over := g.lost(1 - i) // it closed on bytes that it had not read, so the tunnel may have ended by now
	for n = min(n, loopData-p.sent); n > 0 && !p.fin; {
		w, err := syscall.SendmsgN(p.fd, p.send[p.sent:p.sent+n], nil, nil, syscall.MSG_DONTWAIT|syscall.MSG_NOSIGNAL)
		switch {
		case err == syscall.EAGAIN:
			return nil
		case isReset(err):
			p.cut = true
			return nil
		case err != nil:
			return err
		}
		p.sent += w
		n -= w
		if w > 128 && p.eof && from.closed && !over {
			g.loud = true
		}
	}
	return nil
}

// read reads once, and again where it was interrupted.
func (p *player) read(buf []byte, flags int) error {
	n, _, err := syscall.Recvfrom(p.fd, buf, flags)
	for err == syscall.EINTR {
		n, _, err = syscall.Recvfrom(p.fd, buf, flags)
	}
	switch {
	case isReset(err):
		p.cut = true
	case err == syscall.EAGAIN && flags != 0:
	case err != nil:
		return fmt.Errorf("nothing came: %w", err)
	case n == 0:
		p.eof = p.eof || !p.cut // after a reset that a write heard of, it means nothing
	case !bytes.Equal(buf[:n], p.want[p.got:min(p.got+n, len(p.want))]):
		return fmt.Errorf("the %d bytes from %d are not the ones that were sent", n, p.got)
	default:
		p.got += n
	}
	return nil
}

// end ends the stream, unless it has been.
func (p *player) end() error {
	if p.fin || p.gone() || p.cut {
		return nil
	}
	switch err := syscall.Shutdown(p.fd, syscall.SHUT_WR); err {
	case nil:
		p.fin = true
	case syscall.ENOTCONN: // it was reset; a read will tell
	default:
		return err
	}
	return nil
}

// close closes the socket, with a reset if that is what p does.
func (p *player) close() error {
	if p.fd < 0 {
		return nil
	}
	if !p.closed {
		_ = syscall.SetsockoptLinger(p.fd, syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
	}
	fd := p.fd
	p.fd = -1
	return syscall.Close(fd)
}

// wait waits until the limit has passed, if it must end the tunnel, or a moment.
func (g *game) wait(n int) error {
	c, s := &g.sides[0], &g.sides[1]
	switch {
	case g.limit == tunnel.Idle, g.limit == tunnel.HalfClosed && (c.fin && s.eof && !s.fin || s.fin && c.eof && !c.fin):
		return g.hear()
	}
	time.Sleep(time.Duration(n>>12) * time.Microsecond) // at most 256 µs, and most often no time at all
	return nil
}

// hear waits for the tunnel's end.
func (g *game) hear() error {
	if g.told {
		return nil
	}
	select {
	case g.history.end = <-g.ended:
		g.told = true
		if g.limit != "" && g.history.end.Reason == g.limit && time.Since(g.began) < brief {
			return fmt.Errorf("the limit of %v had not passed", brief)
		}
		return nil
	case <-time.After(patience):
		return errors.New("the tunnel does not end")
	}
}

// finish lets the tunnel end and reads what is left of it.
func (g *game) finish() error {
	byItself := g.over() && tunnel.InKernel // the other path may have to read to hear of it
	if byItself {
		if err := g.hear(); err != nil {
			return err
		}
	}
	for i := range g.players {
		if p := &g.players[i]; !byItself {
			if err := p.end(); err != nil {
				return err
			}
		}
	}
	for i := range g.players {
		for p := &g.players[i]; !p.gone() && !p.eof && !p.cut; {
			if err := p.read(g.rig.buf, 0); err != nil {
				return err
			}
		}
	}
	if err := g.hear(); err != nil {
		return err
	}
	for i := range g.players { // after an end of stream, a reset is not told of by a read
		if p := &g.players[i]; p.fd >= 0 && !p.cut {
			errno, err := syscall.GetsockoptInt(p.fd, syscall.SOL_SOCKET, syscall.SO_ERROR)
			p.cut = err == nil && errno != 0
		}
	}
	return nil
}

// blame checks that a reset is put down to the side it came from.
func (g *game) blame() error {
	if g.history.end.Err == nil || !tunnel.InKernel {
		return nil
	}
	text := g.history.end.Err.Error()
	for i, who := range [2]string{"client: ", "service: "} {
		other := &g.sides[1-i]
		if !other.reset && !g.lost(1-i) && !strings.HasPrefix(text, who) {
			return fmt.Errorf("the error is %q, want one of the %s", text, who)
		}
	}
	return nil
}

func (g *game) closeAll() {
	for i := range g.players {
		if p := &g.players[i]; p.party != nil {
			_ = p.close()
		}
	}
}
