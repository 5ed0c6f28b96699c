package reverse

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

const replicaIDOfTests = "spiffe://corp.example/gw"

// A testReplica is a testGateway that has other replicas. It is the tunnel.Transport to itself
// from those.
type testReplica struct {
	*testGateway
	replicas *Replicas
	addr     netip.Addr  // by which it asks others
	apart    atomic.Bool // nobody reaches it
	passed   atomic.Int64
	mu       sync.Mutex
	conns    []net.Conn // of the others
}

// newTestReplicas returns replicas that run until the test ends.
func newTestReplicas(t *testing.T, n int) []*testReplica {
	t.Helper()
	all := make([]*testReplica, n)
	c := &ReplicaConfig{IDs: []string{replicaIDOfTests}}
	for i := range all {
		all[i] = &testReplica{testGateway: newTestGateway(t)}
		c.To = append(c.To, netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 443).String())
	}
	for _, r := range all {
		r.replicas = &Replicas{Server: r.Server, NewTransport: func(_ *ReplicaConfig, address, _ string) (tunnel.Transport, error) {
			return &toReplica{from: r, testReplica: all[slices.Index(c.To, address)]}, nil
		}}
		r.groups.PassedOn = r.replicas.PassedOn
		r.replicas.Use(c)
	}
	for _, r := range all { // once each can be dialed
		ctx, stop := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = r.replicas.Run(ctx)
		}()
		t.Cleanup(func() {
			stop()
			<-done
		})
	}
	for _, r := range all {
		eventually(t, "the replica has a stream to the others", func() bool {
			connected, self := 0, 0
			for _, s := range r.replicas.Status() {
				if s.Connected {
					connected++
				}
				if s.Self {
					self++
				}
			}
			return connected == n-1 && self == 1
		})
	}
	return all
}

// partition keeps r from the others, or ends that.
func (r *testReplica) partition(all []*testReplica, on bool) {
	r.apart.Store(on)
	for _, o := range all {
		o.mu.Lock()
		for _, c := range o.conns {
			_ = c.Close()
		}
		o.conns = nil
		o.mu.Unlock()
	}
}

// A toReplica is the transport from one replica to another.
type toReplica struct {
	from *testReplica
	*testReplica
}

// Dial implements tunnel.Transport.
func (r *toReplica) Dial(ctx context.Context, ep *tunnel.Endpoint, asked *tunnel.Request) (net.Conn, error) {
	if (r.apart.Load() || r.from.apart.Load()) && r.from != r.testReplica {
		return nil, errors.New("the network is down")
	}
	req := by(replicaIDOfTests)
	req.Name, req.Port, req.TLS = tunnel.MustParseName(ep.Host), ep.Addr.Port(), &tunnel.EndedTLS{Peer: req.Peer}
	req.Source = netip.AddrPortFrom(r.from.addr, 1024)
	if req.Name != ReplicasName {
		r.passed.Add(1)
		s := r.groups.Service(req.Name)
		if s == nil {
			return nil, tunnel.Refusef(tunnel.NoRoute, "no such name")
		}
		return r.groups.Transport(s.Endpoints[0].Group, false).Dial(ctx, &tunnel.Endpoint{Addr: ep.Addr}, req)
	}
	near, far, err := tcpPair(ctx)
	if err != nil {
		return nil, err
	}
	refused := make(chan error, 1)
	accepted := make(chan struct{})
	req.Refuse = func(err error) { refused <- err }
	req.Accept = func() (tunnel.Stream, error) {
		close(accepted)
		return far.(tunnel.Stream), nil
	}
	r.testGateway.mu.Lock()
	defer r.testGateway.mu.Unlock()
	r.serving.Go(func() { r.replicas.ServeTunnel(r.ctx, req) })
	select {
	case err := <-refused:
		_, _ = near.Close(), far.Close()
		return nil, err
	case <-accepted:
		r.mu.Lock()
		defer r.mu.Unlock()
		r.conns = append(r.conns, near)
		return near, nil
	}
}

func (*toReplica) Check(*tunnel.Endpoint) error { return nil }

func (*toReplica) Info() tunnel.TransportInfo { return tunnel.TransportInfo{} }

// remotes returns how many sessions of other replicas r knows of for a name.
func (r *testReplica) remotes(name string) (n int) {
	for _, l := range r.groups.List() {
		for _, s := range l.Remote {
			if l.Name.String() == name {
				n += s.Sessions
			}
		}
	}
	return n
}

func (r *testReplica) owner(name string) string {
	for _, l := range r.groups.List() {
		if l.Name.String() == name {
			return l.Owner
		}
	}
	return ""
}

// newNamedReplicas returns replicas that know each other by a DNS name. run begins one, for which
// the name has the addresses of some of them.
func newNamedReplicas(t *testing.T, n int) (all []*testReplica, run func(r *testReplica, knows ...*testReplica) (stop func())) {
	t.Helper()
	c := &ReplicaConfig{To: []string{"gateways.example:443"}, IDs: []string{replicaIDOfTests}}
	for i := range n {
		all = append(all, &testReplica{testGateway: newTestGateway(t), addr: netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})})
	}
	return all, func(r *testReplica, knows ...*testReplica) (stop func()) {
		r.replicas = &Replicas{
			Server: r.Server,
			Lookup: func(context.Context, string) (all []netip.Addr, err error) {
				for _, o := range knows {
					all = append(all, o.addr)
				}
				return all, nil
			},
			NewTransport: func(_ *ReplicaConfig, address, name string) (tunnel.Transport, error) {
				at := slices.IndexFunc(all, func(o *testReplica) bool { return address == netip.AddrPortFrom(o.addr, 443).String() })
				if at < 0 || name != "gateways.example" {
					return nil, errors.New("not to be dialed")
				}
				return &toReplica{from: r, testReplica: all[at]}, nil
			},
		}
		r.groups.PassedOn = r.replicas.PassedOn
		r.replicas.Use(c)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = r.replicas.Run(ctx)
		}()
		stop = func() {
			cancel()
			<-done
		}
		t.Cleanup(stop)
		return stop
	}
}

// A replica that DNS does not have yet asks another one, which asks it back at the address that
// it asks from; and no more when it is gone.
func TestReplicasAskThoseThatAsk(t *testing.T) {
	all, begin := newNamedReplicas(t, 2)
	old, young := all[0], all[1]
	begin(old)
	stop := begin(young, old, young)
	run(t, client([]Registration{named("cam.edge.example")}, young.testGateway))
	eventually(t, "the old replica knows the names of the young one", func() bool { return old.remotes("cam.edge.example") == 1 })
	if list := old.replicas.Status(); len(list) != 1 || list[0].Address != "192.0.2.2:443" || !list[0].Connected {
		t.Errorf("the old replica has streams to %+v, want one to the young one", list)
	}
	stop()
	eventually(t, "the young one is not asked any more", func() bool { return len(old.replicas.Status()) == 0 })
}

// Replicas that have just started, for all of which DNS has only an old one, learn of each other
// from that one; and no more of one that is gone.
func TestReplicasTellOfOthers(t *testing.T) {
	all, begin := newNamedReplicas(t, 3)
	old, young := all[0], all[1:]
	begin(old)
	begin(young[0], old)
	stop := begin(young[1], old)
	run(t, client([]Registration{named("cam.edge.example")}, young[1].testGateway))
	eventually(t, "the other young replica knows the names", func() bool { return young[0].remotes("cam.edge.example") == 1 })
	conn, line, err := young[0].dial(t, "cam.edge.example", 443)
	if err != nil || line != "cam.edge.example:443" {
		t.Fatalf("got %q and %v", line, err)
	}
	_ = conn.Close()
	stop()
	for _, r := range []*testReplica{old, young[0]} {
		eventually(t, "one that is gone is not asked any more", func() bool {
			return !slices.ContainsFunc(r.replicas.Status(), func(s ReplicaStatus) bool { return s.Address == "192.0.2.3:443" })
		})
	}
}

// A request that comes to a replica without the session is passed on to the one that has it,
// and no further.
func TestReplicasPassRequestsOn(t *testing.T) {
	all := newTestReplicas(t, 3)
	c := client([]Registration{{Name: named("cam.edge.example").Name, Port: 8443}, named("*.sites.example")}, all[0].testGateway)
	stop := run(t, c)
	for _, r := range all[1:] {
		eventually(t, "another replica knows of the names", func() bool { return r.remotes("cam.edge.example") == 1 && r.remotes("*.sites.example") == 1 })
		for _, name := range []string{"cam.edge.example", "a.sites.example"} {
			conn, line, err := r.dial(t, name, 8443)
			if want := net.JoinHostPort(name, "8443"); err != nil || line != want {
				t.Fatalf("%s: got %q and %v, want %q", name, line, err, want)
			}
			_ = conn.Close()
		}
		if _, _, err := r.dial(t, "cam.edge.example", 443); err == nil {
			t.Error("a port that is not registered: no error")
		}
	}
	if n := all[0].passed.Load(); n != 4 {
		t.Errorf("%d requests came to the replica with the session, want 4", n)
	}
	info := all[1].groups.Transport(liveGroup(named("cam.edge.example").Name), false).Info()
	if len(info.Hops) != 2 || info.Hops[0] != "replica "+all[0].Replica()+" at 192.0.2.0:443" {
		t.Errorf("the hops are %q, want the replica and its session", info.Hops)
	}

	// The name has moved while the others do not know of it: the request ends at the second
	// replica, which does not pass it on again.
	passedOn := by(replicaIDOfTests)
	passedOn.Name, passedOn.TLS = tunnel.MustParseName("cam.edge.example"), &tunnel.EndedTLS{Peer: passedOn.Peer}
	_, err := all[1].groups.Transport("@cam.edge.example", false).Dial(t.Context(), &tunnel.Endpoint{Addr: netip.AddrPortFrom(netip.Addr{}, 8443)}, passedOn)
	if !errors.Is(err, errPassedOn) || tunnel.ReasonOf(err) != tunnel.DialFailed {
		t.Errorf("a request that was passed on before: got %v, want %v", err, errPassedOn)
	}

	stop()
	for _, r := range all[1:] {
		eventually(t, "the sessions are gone", func() bool { return r.remotes("cam.edge.example") == 0 })
		if _, _, err := r.dial(t, "cam.edge.example", 8443); err == nil {
			t.Error("a name without a session: no error")
		}
		if got := r.owner("cam.edge.example"); got != all[0].testGateway.owner {
			t.Errorf("the name is kept for %q, want %q", got, all[0].testGateway.owner)
		}
	}
}

// A name that one replica holds is refused to another owner at all of them, also after the
// replica with the last session is gone.
func TestReplicasRefuseOtherOwners(t *testing.T) {
	all := newTestReplicas(t, 2)
	run(t, client([]Registration{named("cam.edge.example")}, all[0].testGateway))
	eventually(t, "the other replica knows", func() bool { return all[1].remotes("cam.edge.example") == 1 })
	other := by("spiffe://corp.example/other")
	join := func(name string) error {
		m, err := all[1].groups.Join(other, &fakeSession{}, named(name))
		if err == nil {
			m.Leave()
		}
		return err
	}
	for _, name := range []string{"cam.edge.example", "*.edge.example"} {
		if err := join(name); tunnel.ReasonOf(err) != tunnel.Denied || !errors.Is(err, errTaken) {
			t.Errorf("%s for another owner: got %v, want it denied", name, err)
		}
	}
	all[0].partition(all, true)
	eventually(t, "the replica is gone", func() bool { return all[1].remotes("cam.edge.example") == 0 })
	if err := join("cam.edge.example"); !errors.Is(err, errTaken) {
		t.Errorf("for another owner, without the replica: got %v, want it denied", err)
	}
	mine := by(all[0].testGateway.owner)
	if _, err := all[1].groups.Join(mine, &fakeSession{}, named("cam.edge.example")); err != nil {
		t.Errorf("for its owner, without the replica: %v", err)
	}
}

// Two owners get a name while the replicas do not reach each other. The first one keeps it
// afterwards, at both, and the other one is told.
func TestPartitionedReplicasHaveOneWinner(t *testing.T) {
	for _, firstAt := range []int{0, 1} {
		all := newTestReplicas(t, 2)
		all[0].partition(all, true)
		all[0].testGateway.owner, all[1].testGateway.owner = "spiffe://corp.example/a", "spiffe://corp.example/b"
		a, b := client([]Registration{named("cam.edge.example")}, all[firstAt].testGateway), client([]Registration{named("cam.edge.example"), named("own.edge.example")}, all[1-firstAt].testGateway)
		run(t, a)
		eventually(t, "the first owner has the name", func() bool { return all[firstAt].members("cam.edge.example") == 1 })
		<-time.After(5 * time.Millisecond) // not in the same millisecond
		run(t, b)
		eventually(t, "so has the second one, at the other replica", func() bool { return all[1-firstAt].members("cam.edge.example") == 1 })
		all[0].partition(all, false)
		want := all[firstAt].testGateway.owner
		for _, r := range all {
			eventually(t, "the first owner keeps it", func() bool { return r.owner("cam.edge.example") == want })
		}
		eventually(t, "the loser is told", func() bool {
			s := b.State()[0]
			return s.Connected && slices.ContainsFunc(s.Names, func(n Result) bool {
				return n.Name.String() == "cam.edge.example" && n.Reason == tunnel.Denied && n.Taken
			})
		})
		eventually(t, "the loser's replica passes requests on to the winner", func() bool { return all[1-firstAt].remotes("cam.edge.example") == 1 })
		if n := all[1-firstAt].members("own.edge.example"); n != 1 {
			t.Errorf("the loser's other name has %d sessions, want 1", n)
		}
		if n := all[firstAt].members("cam.edge.example"); n != 1 {
			t.Errorf("the winner has %d sessions, want 1", n)
		}
	}
}

// A replica that drains is asked last, and its names stay known until it is gone.
func TestReplicasDrain(t *testing.T) {
	all := newTestReplicas(t, 3)
	group := "@cam.edge.example"
	for _, r := range all[:2] {
		m, err := r.groups.Join(by(r.testGateway.owner), &fakeSession{}, named("cam.edge.example"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Leave)
	}
	eventually(t, "the third one knows of both", func() bool { return all[2].remotes("cam.edge.example") == 2 })
	// The third one has lost its streams, and asks again in the drain, as one does that starts then.
	all[2].partition(all, true)
	eventually(t, "the third one knows of none", func() bool { return all[2].remotes("cam.edge.example") == 0 })
	all[0].replicas.Drain()
	all[2].partition(all, false)
	at := groupTransport{groups: all[2].groups, name: group}
	eventually(t, "it knows that one drains", func() bool {
		for range 20 {
			if got := at.elsewhere(443); len(got) != 2 || got[0].link.replicaID() != all[1].Replica() || !got[1].Draining {
				return false
			}
		}
		return true
	})
	all[0].replicas.End()
	eventually(t, "the one that has ended is gone", func() bool { return all[2].remotes("cam.edge.example") == 1 })
}

// Only replicas are told of names, and what a replica says is checked.
func TestReplicasAreStrict(t *testing.T) {
	g := newTestGateway(t)
	r := &Replicas{Server: g.Server}
	r.Use(&ReplicaConfig{IDs: []string{replicaIDOfTests}})
	var refusal error
	req := by("spiffe://corp.example/edge")
	req.Name, req.TLS = ReplicasName, &tunnel.EndedTLS{Peer: req.Peer}
	req.Refuse = func(err error) { refusal = err }
	if r.ServeTunnel(t.Context(), req); tunnel.ReasonOf(refusal) != tunnel.Denied {
		t.Errorf("a stranger: got %v, want it denied", refusal)
	}
	cam := named("cam.edge.example").Name
	good := replicaName{Name: cam, Owner: "spiffe://corp.example/edge", Since: 1, Serves: []replicaGroup{{Weight: 1, Sessions: 1}}}
	bad := map[string]replicaName{"no name": {Owner: good.Owner}, "a reserved name": good, "no owner": {Name: cam}, "no session": good, "a group": good, "time": good}
	set := func(key string, change func(*replicaName)) {
		n := bad[key]
		n.Serves = slices.Clone(n.Serves)
		change(&n)
		bad[key] = n
	}
	set("a reserved name", func(n *replicaName) { n.Name = tunnel.Pattern{Suffix: Name} })
	set("no session", func(n *replicaName) { n.Serves[0].Sessions = 0 })
	set("a group", func(n *replicaName) { n.Serves[0].Group = "@x" })
	set("time", func(n *replicaName) { n.Left = -1 })
	for what, n := range bad {
		l := &replicaLink{replicas: r, names: map[tunnel.Pattern]struct{}{}}
		if err := l.take(&replicaLine{Generation: 1, Names: []replicaName{n}}); tunnel.ReasonOf(err) != tunnel.BadRequest {
			t.Errorf("%s: got %v, want %q", what, err, tunnel.BadRequest)
		}
	}
	l := &replicaLink{replicas: r, names: map[tunnel.Pattern]struct{}{}}
	if err := l.take(&replicaLine{Generation: 1, Names: []replicaName{good}}); err != nil {
		t.Fatal(err)
	}
	if err := l.take(&replicaLine{Generation: 3}); err == nil {
		t.Error("a change after one that is missing: no error")
	}
	if g.groups.Service(cam.Suffix) == nil {
		t.Error("the name is not known")
	}

	// What came to another replica from a caller without an identity is that here, too.
	passedOn := by(replicaIDOfTests)
	passedOn.TLS = &tunnel.EndedTLS{Peer: passedOn.Peer}
	between := passedOn.TLS
	client := netip.MustParseAddrPort("198.51.100.7:443")
	passedOn.StatedSource = client
	if r.Restore(passedOn); passedOn.Source != client || passedOn.Peer.Method != "" || !passedOn.DeferIdentity || passedOn.TLS != nil {
		t.Errorf("a request of a caller without an identity is of %+v", passedOn.Peer)
	}
	if !r.PassedOn(passedOn) {
		t.Error("a request that was restored could be passed on again")
	}
	stated := by("alice")
	stated.TLS = between
	if r.Restore(stated); stated.Peer.ID != "alice" || stated.DeferIdentity || !stated.PassedOn {
		t.Errorf("a request of a caller that was stated is of %+v", stated.Peer)
	}
	stranger := by("spiffe://corp.example/edge")
	stranger.TLS, stranger.StatedSource = &tunnel.EndedTLS{Peer: stranger.Peer}, client
	if r.Restore(stranger); stranger.Source == client || stranger.Peer.Method == "" || stranger.DeferIdentity || stranger.PassedOn || r.PassedOn(stranger) {
		t.Errorf("a request of a stranger is taken for one of a replica: %+v", stranger)
	}
}

// The transport to a replica is told which name its address has.
func TestNamesOfReplicaAddresses(t *testing.T) {
	r := &Replicas{Lookup: func(_ context.Context, host string) ([]netip.Addr, error) {
		if host != "gateways.example" {
			return nil, errors.New("there is no such name")
		}
		return []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("::ffff:192.0.2.2"), netip.MustParseAddr("127.0.0.1")}, nil
	}}
	got, complete := r.addresses(t.Context(), &ReplicaConfig{To: []string{"192.0.2.1:443", "192.0.2.9:443", "gateways.example:443", "192.0.2.2:443", "[2001:db8::1]:8443"}})
	want := map[string]string{"192.0.2.1:443": "gateways.example", "192.0.2.2:443": "gateways.example", "192.0.2.9:443": "", "[2001:db8::1]:8443": ""}
	if !complete || !maps.Equal(got, want) {
		t.Errorf("addresses are %v, complete %v; want %v", got, complete, want)
	}
	if _, complete := r.addresses(t.Context(), &ReplicaConfig{To: []string{"gone.example:443"}}); complete {
		t.Error("addresses are complete without those of a name")
	}
}
