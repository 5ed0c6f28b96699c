package reverse

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/tunnel"
)

// A clientSession is one session of a Client.
type clientSession struct {
	client  *Client
	slot    *slot
	carrier *carrierConn
	since   time.Time
	proto   h2.Protocol
	streams atomic.Int64
	pool    *clientPool // nil for none
	sending sync.Mutex  // held by sendNames
	replica string
	names   []Result // guarded by the client's mu

	mu       sync.Mutex // guards what follows
	control  *controlStream
	draining bool
	sent     uint64 // the last of the client's changes that the gateway has
	err      error

	drained chan struct{} // closed where the gateway drains
	ended   chan struct{} // closed at the end of serve
}

// begin sends the hello and returns the welcome.
func (x *clientSession) begin(first *hello) (*welcome, error) {
	if err := writeJSON(x.carrier, first); err != nil {
		return nil, fmt.Errorf("reverse: gateway %q: %w", x.slot.gateway.Name, err)
	}
	var w welcome
	if err := readLine(x.carrier.early, &w, maxAnswer); err != nil {
		return nil, fmt.Errorf("reverse: gateway %q gave no answer: %w", x.slot.gateway.Name, err)
	}
	switch {
	case w.Same:
		return nil, ErrSameReplica
	case w.Error != "":
		return nil, fmt.Errorf("reverse: gateway %q refused the session: %q", x.slot.gateway.Name, tunnel.Clip(w.Error))
	case w.Version != version:
		return nil, fmt.Errorf("reverse: gateway %q speaks version %d of the protocol, want %d", x.slot.gateway.Name, w.Version, version)
	}
	w.Replica = clip(w.Replica)
	return &w, nil
}

// fillHello adds as many of list to the first line as fit. It reports whether these are all.
func (*clientSession) fillHello(first *hello, list []Registration) (all bool) {
	b, err := json.Marshal(first)
	if err != nil {
		return false
	}
	part, rest := cut(list, len(b))
	first.Register = part
	return len(rest) == 0
}

// setResults keeps and returns the results of all names: those that the gateway has sent, and those
// of names that it was not asked for.
func (x *clientSession) setResults(sent []Result) []Result {
	c := x.client
	c.mu.Lock()
	defer c.mu.Unlock()
	x.names = slices.Concat(sent, c.over)
	return x.names
}

// maxNamesLogged bounds the lines for the names of one list.
const maxNamesLogged = 20

// logRefused logs the names that are refused.
func (x *clientSession) logRefused(results []Result) {
	refused := 0
	defer func() {
		if refused > maxNamesLogged {
			x.client.log().Warn("more names are refused", "gateway", x.slot.gateway.Name, "names", refused-maxNamesLogged)
		}
	}()
	for i := range results {
		if r := &results[i]; r.Reason != "" {
			if refused++; refused > maxNamesLogged {
				continue
			}
			x.client.log().Warn("the gateway refused a name", "gateway", x.slot.gateway.Name, "name", r.Name.String(), "port", r.Port, "reason", string(r.Reason), "error", tunnel.Clip(r.Error))
		}
	}
}

// serve serves the requests that come until the session ends.
func (x *clientSession) serve(ctx context.Context) {
	defer close(x.ended)
	defer x.client.remove(x)
	x.proto.Streams, x.proto.Idle = maxStreams, math.MaxInt64/4
	via := func() string { return "" }
	if x.client.Via != nil {
		via = x.client.Via
	}
	x.proto.Service = &service{connect.Protocol{CurrentVia: via}, x.pool}
	late := time.AfterFunc(controlTimeout, func() {
		defer x.client.recovered()
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.control == nil {
			_ = x.carrier.Close()
		}
	})
	defer late.Stop()
	defer x.carrier.watch(x.caught)()
	x.fail(x.proto.ServeConn(ctx, tunnel.NewConn(x.carrier), x))
}

// wait returns why the session has ended, or errDraining once another one is to take its place.
func (x *clientSession) wait(ctx context.Context) error {
	select {
	case <-x.ended:
		x.mu.Lock()
		defer x.mu.Unlock()
		return x.err
	case <-x.drained:
		return errDraining
	case <-ctx.Done():
		return ctx.Err()
	}
}

// errDraining is the error of a session whose gateway is about to stop.
var errDraining = errors.New("reverse: the gateway is about to stop")

func (x *clientSession) isDraining() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.draining
}

// ServeTunnel implements tunnel.Handler: it serves one stream of the session.
func (x *clientSession) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	if req.Name == controlName {
		x.serveControl(ctx, req)
		return
	}
	x.streams.Add(1)
	left := sync.OnceFunc(func() { x.streams.Add(-1) })
	accept, accepted := req.Accept, false
	req.Accept = func() (tunnel.Stream, error) {
		stream, err := accept()
		st, ok := stream.(*h2.Stream)
		if err != nil || !ok {
			return stream, err
		}
		accepted = true
		return &servedStream{st, left}, nil
	}
	defer func() {
		if !accepted {
			left()
		}
	}()
	ctx, done := x.overPool(ctx, req)
	defer done()
	req.Listener = "reverse:" + x.slot.gateway.Name
	x.client.Handler.ServeTunnel(ctx, req)
}

// serveControl serves the control stream, whose end is that of the session.
func (x *clientSession) serveControl(ctx context.Context, req *tunnel.Request) {
	x.mu.Lock()
	taken := x.control != nil
	x.mu.Unlock()
	if taken {
		req.Refuse(tunnel.Refusef(tunnel.Denied, "reverse: the session has a control stream"))
		return
	}
	stream, err := req.Accept()
	if err != nil {
		return
	}
	s := &controlStream{conn: stream}
	x.mu.Lock()
	if x.control != nil {
		x.mu.Unlock()
		_ = stream.Close()
		return
	}
	x.control = s
	x.mu.Unlock()
	done := make(chan struct{})
	var working sync.WaitGroup
	defer func() {
		close(done)
		working.Wait()
		_ = stream.Close()
		_ = x.carrier.Close() // which ends the session
	}()
	working.Go(func() {
		defer x.client.recovered()
		x.sendNames()
	})
	defer s.ping(x.carrier, x.caught)()
	if x.pool != nil {
		working.Go(func() {
			defer x.client.recovered()
			x.pool.run(ctx, done)
		})
	}
	x.fail(fmt.Errorf("reverse: the control stream ended: %w", s.read(maxAnswer, x.handle)))
}

// caught logs a panic, and ends the session.
func (x *clientSession) caught(v any) {
	x.client.caught(v)
	_ = x.carrier.Close()
}

// fail records why the session has ended. The first reason counts.
func (x *clientSession) fail(err error) {
	if x.carrier.dead.Load() {
		err = errDead
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.err == nil {
		x.err = err
	}
}

// handle handles one line of the control stream.
func (x *clientSession) handle(c *control) error {
	switch c.Kind {
	case kindRegistered:
		x.logRefused(x.setResults(c.Names))
		x.client.changed()
	case kindTickets:
		if x.pool != nil {
			x.pool.got(c.Tickets)
		}
	case kindDrain:
		x.mu.Lock()
		first := !x.draining
		x.draining = true
		x.mu.Unlock()
		if first {
			x.client.log().Info("the gateway is about to stop", "gateway", x.slot.gateway.Name, "replica", x.replica)
			close(x.drained)
			x.client.start(func() {
				x.awaitReplacement()
				x.finish()
			})
		}
	}
	return nil
}

// sendNames sends the gateway the current names, if it does not have them.
func (x *clientSession) sendNames() {
	x.sending.Lock()
	defer x.sending.Unlock()
	c := x.client
	c.mu.Lock()
	names, changes := c.names, c.changes
	c.mu.Unlock()
	x.mu.Lock()
	s := x.control
	known := x.sent == changes
	if s != nil {
		x.sent = changes
	}
	x.mu.Unlock()
	if s != nil && !known {
		_ = s.sendList(names)
	}
}

// finish ends x with the last of its streams. It tells the gateway first, so that new requests use
// other sessions.
func (x *clientSession) finish() {
	x.mu.Lock()
	s := x.control
	x.mu.Unlock()
	if s != nil {
		_ = s.send(control{Kind: kindDrain})
	}
	x.proto.Drain()
	tick := time.NewTicker(drainTick)
	defer tick.Stop()
	for idle := 0; idle < 2; {
		select {
		case <-x.ended:
			return
		case <-tick.C:
		}
		if idle++; x.streams.Load() > 0 {
			idle = 0
		}
	}
	_ = x.carrier.Close()
}

// awaitReplacement waits until another session has taken the place of x, whose gateway drains. It
// gives up after replaceWithin.
func (x *clientSession) awaitReplacement() {
	late := time.NewTimer(replaceWithin)
	defer late.Stop()
	tick := time.NewTicker(drainTick)
	defer tick.Stop()
	for {
		select {
		case <-x.ended:
			return
		case <-late.C:
			return
		case <-tick.C:
		}
		x.client.mu.Lock()
		now := x.slot.session
		x.client.mu.Unlock()
		if now != nil && now != x {
			return
		}
	}
}

// Handler of the session's streams.
var _ interface {
	tunnel.Handler
	tunnel.Refuser
} = (*clientSession)(nil)

// Refused implements tunnel.Refuser.
func (x *clientSession) Refused(req *tunnel.Request, err error) {
	x.client.log().Debug("request on a session refused", "gateway", x.slot.gateway.Name, "target", tunnel.Clip(req.Target()), "error", err.Error())
}

// Panicked implements tunnel.Refuser.
func (x *clientSession) Panicked(_ *tunnel.Request, v any) {
	p := tunnel.Caught(v)
	x.client.log().Error("panic in a reverse session", "error", p.Error(), "stack", string(p.Stack))
}

// A service admits the requests of a session.
type service struct {
	connect.Protocol
	pool *clientPool // nil for none
}

// isControl reports whether the control stream is asked for.
func isControl(authority string) bool { return strings.HasPrefix(authority, controlName.String()+":") }

// Name implements connect.Service.
func (*service) Name() string { return "reverse" }
