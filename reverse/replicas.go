package reverse

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// ReplicasName is asked, by CONNECT, for the names that one replica of a gateway has sessions
// for.
var ReplicasName = tunnel.MustParseName("replicas." + tunnel.ReservedZone)

// Times and limits of Replicas.
const (
	maxReplicas      = 64               // addresses, and as many streams of others
	maxReplicaLine   = 1 << 20          // bytes; most lines are not above maxReplicaBatch
	maxReplicaBatch  = 32 << 10         // bytes of names in a line, and one name
	replicaLookup    = 5 * time.Second  // between two lookups of the addresses
	replicaOpening   = 10 * time.Second // of a stream
	replicaLastRetry = 5 * time.Second
	replicaSame      = 30 * time.Second // until an address is tried again that leads to this process
	replicaPing      = time.Second
	replicaDead      = 5 * time.Second // without a line
	replicaNews      = 20 * time.Millisecond
)

// Replicas tells the other replicas of a gateway for which names this one has sessions, and
// learns the same from them. A request for a name that has sessions at another replica only is
// passed on to it, once: PassedOn recognises it there. The fields are not changed once Run is
// called.
//
// A name that one replica holds for an owner is refused to other owners at all of them. Where
// two of them could not reach each other meanwhile, the owner that has had the name for longer
// keeps it, and of two at the same millisecond the one with the lesser id.
type Replicas struct {
	Server *Server // with its Groups

	// Lookup finds the addresses of a name, again every few seconds. Nil means that it has none.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)

	// NewTransport returns the transport to the replica at an address. name is the host of
	// ReplicaConfig.To that has the address; "" where To has the address itself.
	NewTransport func(c *ReplicaConfig, address, name string) (tunnel.Transport, error)

	// Log receives which replicas come and go. Nil discards it.
	Log *slog.Logger

	mu       sync.Mutex // guards what follows
	config   *ReplicaConfig
	changed  chan struct{} // closed by Use
	learned  chan struct{} // closed when another replica opens a stream, or sends addresses of others
	links    []*replicaLink
	serving  map[*replicaServing]struct{}
	draining bool
	ended    bool
}

// A ReplicaConfig says where the other replicas are, and how they are known. It is not changed
// once it is used.
type ReplicaConfig struct {
	To  []string // HOST:PORT; all addresses of a name are used, and this process may be among them
	IDs []string // the SPIFFE ids of replicas
	Hop any      // of NewTransport
}

// Use has r follow other replicas, nil for none. Streams of the same configuration stay.
func (r *Replicas) Use(c *ReplicaConfig) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if reflect.DeepEqual(r.config, c) {
		return
	}
	r.config = c
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
	for s := range r.serving {
		if c == nil || !slices.Contains(c.IDs, s.id) {
			_ = s.conn.Close()
		}
	}
}

// current returns the configuration, and what is closed when there is another one.
func (r *Replicas) current() (*ReplicaConfig, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.changed == nil {
		r.changed = make(chan struct{})
	}
	return r.config, r.changed
}

// is reports whether the client of req is another replica.
func (r *Replicas) is(req *tunnel.Request) bool {
	if req.TLS == nil || req.TLS.Peer.Method != "mtls" {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.config != nil && slices.Contains(r.config.IDs, req.TLS.Peer.ID)
}

// PassedOn reports whether another replica has passed req on. It is for Groups.PassedOn.
func (r *Replicas) PassedOn(req *tunnel.Request) bool { return req.PassedOn || r.is(req) }

// Restore undoes in req what passing it on has changed, if another replica has done so. The
// address of the caller, and its identity if it has one, are those that the replica has stated. A
// caller without an identity has none here, either: the TLS between the replicas does not count,
// and what was left to the service there is left to it here.
func (r *Replicas) Restore(req *tunnel.Request) {
	if !r.is(req) {
		return
	}
	req.PassedOn = true
	if req.StatedSource.IsValid() {
		req.Source = req.StatedSource
	}
	if req.Peer.Method == req.TLS.Peer.Method && req.Peer.ID == req.TLS.Peer.ID {
		req.Peer, req.TLS, req.DeferIdentity = tunnel.Peer{}, nil, true
	}
}

func (r *Replicas) log() *slog.Logger {
	if r.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return r.Log
}

// Run keeps a stream to each of the other replicas until ctx is done.
func (r *Replicas) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		c, changed := r.current()
		if c == nil {
			select {
			case <-ctx.Done():
			case <-changed:
			}
			continue
		}
		following, stop := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer r.recovered()
			r.follow(following, c)
		}()
		select {
		case <-ctx.Done():
		case <-changed:
		}
		stop()
		<-done
	}
	return nil
}

func (r *Replicas) recovered() {
	if v := recover(); v != nil {
		p := tunnel.Caught(v)
		r.log().Error("panic in the exchange with another replica", "error", p.Error(), "stack", string(p.Stack))
	}
}

// follow keeps a stream to each address of c until ctx is done.
func (r *Replicas) follow(ctx context.Context, c *ReplicaConfig) {
	running := map[string]context.CancelFunc{}
	var working sync.WaitGroup
	defer working.Wait()
	lookup := time.NewTicker(replicaLookup)
	defer lookup.Stop()
	found, complete := r.addresses(ctx, c)
	for {
		addrs, learned := r.withLearned(c, found)
		for _, at := range slices.Sorted(maps.Keys(addrs)) {
			if running[at] != nil || len(running) >= maxReplicas {
				continue
			}
			l := &replicaLink{replicas: r, config: c, address: at, name: addrs[at], since: time.Now()}
			linking, stop := context.WithCancel(ctx)
			running[at] = stop
			r.mu.Lock()
			r.links = append(r.links, l)
			r.mu.Unlock()
			working.Go(func() {
				defer r.recovered()
				defer r.remove(l)
				l.keep(linking)
			})
		}
		for at, stop := range running {
			if _, still := addrs[at]; complete && !still {
				stop()
				delete(running, at)
			}
		}
		select {
		case <-ctx.Done():
			for _, stop := range running {
				stop()
			}
			return
		case <-lookup.C:
			found, complete = r.addresses(ctx, c)
		case <-learned:
		}
	}
}

func (r *Replicas) remove(l *replicaLink) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.links = slices.DeleteFunc(r.links, func(o *replicaLink) bool { return o == l })
}

// addresses returns the addresses of replicas, each with the name that it was looked up for, "" for
// none. complete is false if a lookup has failed.
func (r *Replicas) addresses(ctx context.Context, c *ReplicaConfig) (all map[string]string, complete bool) {
	all, complete = map[string]string{}, true
	add := func(at, name string) { all[at] = cmp.Or(all[at], name) }
	for _, to := range c.To {
		host, port, err := net.SplitHostPort(to)
		if err != nil {
			continue
		}
		if _, err := netip.ParseAddr(host); err == nil {
			add(to, "")
			continue
		}
		if r.Lookup == nil {
			complete = false
			continue
		}
		addrs, err := r.Lookup(ctx, host)
		if err != nil {
			complete = false
			if ctx.Err() == nil {
				r.log().Warn("lookup of the other replicas failed; keeping those that are known", "host", host, "error", err.Error())
			}
			continue
		}
		for _, a := range addrs {
			if why, forbidden := tunnel.Forbidden(a); forbidden {
				r.log().Debug("address of a replica is left out", "host", host, "address", a.String(), "reason", why)
				continue
			}
			add(net.JoinHostPort(a.Unmap().String(), port), host)
		}
	}
	return all, complete
}

// Drain tells the other replicas that this one is about to stop: they prefer others that have
// sessions for the name, too. One that starts meanwhile, in this one's place, may still ask for the
// names: their connectors are here until they have a session elsewhere.
func (r *Replicas) Drain() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.draining = true
	for s := range r.serving {
		s.poke()
	}
}

// End ends the streams of the other replicas, and takes no more.
func (r *Replicas) End() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.draining, r.ended = true, true
	for s := range r.serving {
		_ = s.conn.Close()
	}
}

// A ReplicaStatus is the state of the stream to another replica.
type ReplicaStatus struct {
	Address    string    `json:"address"`
	Replica    string    `json:"replica,omitempty"` // what it calls its process
	Connected  bool      `json:"connected"`
	Self       bool      `json:"self,omitempty"` // the address leads to this process
	Since      time.Time `json:"since"`
	Names      int       `json:"names"` // that it has sent
	Generation uint64    `json:"generation,omitempty"`
	Draining   bool      `json:"draining,omitempty"`
	Error      string    `json:"error,omitempty"` // why there is no stream
}

// Status returns the state of each of the other replicas, sorted by address.
func (r *Replicas) Status() []ReplicaStatus {
	r.mu.Lock()
	links := slices.Clone(r.links)
	r.mu.Unlock()
	all := make([]ReplicaStatus, len(links))
	for i, l := range links {
		all[i] = l.status()
	}
	slices.SortFunc(all, func(a, b ReplicaStatus) int { return cmp.Compare(a.Address, b.Address) })
	return all
}

// A replicaServing is a stream that another replica has opened, on which this one sends its names.
type replicaServing struct {
	id   string     // of the other side, SPIFFE
	addr netip.Addr // of the other side; zero for one that is never dialed
	conn net.Conn
	wake chan struct{} // has room for one

	replica string // what the other side calls its process, "" before its first line; guarded by the mu of Replicas
}

func (s *replicaServing) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// ServeTunnel implements tunnel.Handler: it tells another replica the names of this one.
func (r *Replicas) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	if !r.is(req) {
		r.Server.Router.Refuse(req, tunnel.Refusef(tunnel.Denied, "reverse: %q is not the id of a replica of this gateway", tunnel.Clip(req.Peer.ID)))
		return
	}
	s := &replicaServing{id: req.TLS.Peer.ID, wake: make(chan struct{}, 1)}
	if addr := req.Source.Addr().Unmap().WithZone(""); !req.StatedSource.IsValid() {
		if _, forbidden := tunnel.Forbidden(addr); !forbidden {
			s.addr = addr
		}
	}
	r.mu.Lock()
	full, ended := len(r.serving) >= maxReplicas, r.ended
	r.mu.Unlock()
	switch {
	case ended:
		r.Server.Router.Refuse(req, tunnel.Refusef(tunnel.Drain, "reverse: the gateway is stopping"))
		return
	case full:
		r.Server.Router.Refuse(req, tunnel.Refusef(tunnel.Overload, "reverse: %d replicas have a stream, the limit", maxReplicas))
		return
	}
	stream, err := req.Accept()
	if err != nil {
		return
	}
	s.conn = stream
	defer stream.Close()
	r.mu.Lock()
	if r.ended { // meanwhile
		r.mu.Unlock()
		return
	}
	if r.serving == nil {
		r.serving = map[*replicaServing]struct{}{}
	}
	r.serving[s] = struct{}{}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.serving, s)
		r.wakeOthers(s)
	}()
	stop := context.AfterFunc(ctx, func() {
		defer r.recovered()
		_ = stream.Close()
	})
	defer stop()
	if err := s.serve(ctx, r); err != nil && ctx.Err() == nil {
		r.log().Debug("stream of another replica ended", "source", req.Source.String(), "error", err.Error())
	}
}

// errSilentReplica is the error for a stream on which nothing comes.
var errSilentReplica = fmt.Errorf("reverse: no line has come from the replica for %v", replicaDead)
