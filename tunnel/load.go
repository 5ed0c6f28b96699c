package tunnel

import (
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/tunnel/internal/poll"
)

// An EndpointLoad counts the tunnels of one endpoint of a service: those that are open,
// and those that are being dialed. A Resolver makes it and hands it out in Endpoint.Load;
// the Router counts. The zero value is ready, and a nil one counts nothing. It is safe for
// concurrent use.
type EndpointLoad struct {
	tunnels atomic.Int64

	// Watcher learns how the tunnels begin; nil for nobody. It is set before the
	// EndpointLoad is handed out.
	Watcher EndpointWatcher
}

// An EndpointWatcher learns whether an endpoint answers the tunnels to it. Of each tunnel
// at most one of its methods is called, by any goroutine, and it must not block. Route.Report
// is told of dials.
type EndpointWatcher interface {
	// Answered says that the endpoint has sent the first byte of a tunnel.
	Answered()

	// Unanswered says that the endpoint has aborted a tunnel before it sent a byte, or
	// closed it in place of an answer to a ClientHello, while the client was there.
	Unanswered(err error)
}

// Tunnels returns how many tunnels there are.
func (l *EndpointLoad) Tunnels() int64 {
	if l == nil {
		return 0
	}
	return l.tunnels.Load()
}

func (l *EndpointLoad) add(n int64) {
	if l != nil {
		l.tunnels.Add(n)
	}
}

// enter counts one more tunnel unless there are most already; 0 means no limit.
func (l *EndpointLoad) enter(most int64) bool {
	if l == nil {
		return true
	}
	for {
		n := l.tunnels.Load()
		if most > 0 && n >= most {
			return false
		}
		if l.tunnels.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// watcher returns who learns how tunnels begin, nil for nobody.
func (l *EndpointLoad) watcher() EndpointWatcher {
	if l == nil {
		return nil
	}
	return l.Watcher
}

// ServiceLimits bound what one service has at a time in this process. 0 means no
// limit. They are not changed once they are in a Route.
type ServiceLimits struct {
	Connections            int // tunnels and sessions of datagrams, open or being dialed
	ConnectionsPerEndpoint int // of them, those of one Endpoint that has a Load
	NewPerSecond           int // that begin within a second; after a quiet second as many may begin at once
}

// A loadKey names what requests are counted for.
type loadKey struct {
	route   string // Route.Service
	backend string // Route.Backend
}

// A serviceLoad counts what one service has. It stays as long as requests and tunnels
// refer to it, whatever becomes of the service in the configuration.
type serviceLoad struct {
	key     loadKey
	backend *serviceLoad // of key.backend; nil for none

	connections atomic.Int64 // tunnels and sessions, open or being dialed; forgottenLoad once nobody may use it
	open        atomic.Int64 // of them, those that are open
	full        atomic.Int64 // poll.Clock of the moment when as many as Limits.NewPerSecond may begin again; 0 for any time
}

// forgottenLoad is the number of connections of a serviceLoad that was forgotten.
const forgottenLoad = -1

// limited returns the load that limits are held against.
func (s *serviceLoad) limited() *serviceLoad {
	if s.backend != nil {
		return s.backend
	}
	return s
}

// enter counts one more connection. It is false where s was forgotten. The error is
// the refusal where one more would be over a limit; nothing is counted then.
func (s *serviceLoad) enter(limits *ServiceLimits) (ok bool, refusal *Error) {
	if s.backend != nil {
		if ok, _ := s.add(0); !ok {
			return false, nil
		}
		// The backend stays as long as s does.
		_, refusal := s.backend.enter(limits)
		if refusal != nil {
			s.connections.Add(-1)
		}
		return true, refusal
	}
	most := 0
	if limits != nil {
		most = limits.Connections
	}
	ok, n := s.add(int64(most))
	switch {
	case !ok && n == forgottenLoad:
		return false, nil
	case !ok:
		return true, s.connectionsRefusal(most)
	case limits != nil && limits.NewPerSecond > 0 && !s.takeNew(limits.NewPerSecond, poll.Clock()):
		s.connections.Add(-1)
		return true, s.rateRefusal(limits.NewPerSecond)
	}
	return true, nil
}

// add counts one more connection unless there are most already; 0 means no limit. It
// returns the number before. It is false, and nothing is counted, where s was forgotten
// or is full.
func (s *serviceLoad) add(most int64) (ok bool, before int64) {
	for {
		n := s.connections.Load()
		if n == forgottenLoad || most > 0 && n >= most {
			return false, n
		}
		if s.connections.CompareAndSwap(n, n+1) {
			return true, n
		}
	}
}

// leave takes back what enter has counted.
func (s *serviceLoad) leave() {
	if s == nil {
		return
	}
	if s.backend != nil {
		s.backend.connections.Add(-1)
	}
	s.connections.Add(-1)
}

// takeNew counts a connection that begins at now, and reports whether the rate permits
// it. It is a bucket that is refilled evenly and holds as much as a second gives.
func (s *serviceLoad) takeNew(perSecond int, now int64) bool {
	for {
		was := s.full.Load()
		next, ok := refilled(was, perSecond, now)
		if !ok {
			return false
		}
		if s.full.CompareAndSwap(was, next) {
			return true
		}
	}
}

// refilled returns when a bucket that is full again at the given time is so after one
// more connection at now, and whether it has one left.
func refilled(full int64, perSecond int, now int64) (next int64, ok bool) {
	if full == 0 || full < now {
		full = now
	}
	next = full + int64(time.Second)/int64(perSecond)
	return next, next-now <= int64(time.Second)
}

// check is enter for who counts nothing.
func (s *serviceLoad) check(limits *ServiceLimits) *Error {
	if s == nil || limits == nil {
		return nil
	}
	s = s.limited()
	if most := limits.Connections; most > 0 && s.connections.Load() >= int64(most) {
		return s.connectionsRefusal(most)
	}
	if n := limits.NewPerSecond; n > 0 {
		if _, ok := refilled(s.full.Load(), n, poll.Clock()); !ok {
			return s.rateRefusal(n)
		}
	}
	return nil
}

func (s *serviceLoad) connectionsRefusal(most int) *Error {
	return Refusef(Overload, "service %s: limits.connections: %d connections are open or being dialed, the limit", s.key.route, most)
}

func (s *serviceLoad) rateRefusal(perSecond int) *Error {
	return Refusef(Overload, "service %s: limits.newPerSecond: more than %d new connections in a second, the limit", s.key.route, perSecond)
}

// perEndpoint returns how many connections one endpoint may have; 0 means no limit.
func (l *ServiceLimits) perEndpoint() int64 {
	if l == nil {
		return 0
	}
	return int64(l.ConnectionsPerEndpoint)
}

// serviceLoads are the loads of all services that have had a request for some time. The
// zero value is ready.
type serviceLoads struct {
	all atomic.Int64 // open tunnels

	mu       sync.RWMutex // guards what follows
	loads    map[loadKey]*serviceLoad
	forgetAt int // loads, before those that count nothing are forgotten
}

// minLoads is from how many loads on those that count nothing are forgotten.
const minLoads = 1024

// take counts one more connection of a service. Whoever takes a load leaves it. The
// error is the refusal of one that is over a limit.
func (l *serviceLoads) take(k loadKey, limits *ServiceLimits) (*serviceLoad, error) {
	for {
		s := l.find(k)
		if s == nil {
			s = l.make(k)
		}
		switch ok, refusal := s.enter(limits); {
		case refusal != nil:
			return nil, refusal
		case ok:
			return s, nil
		}
	}
}

// find returns the load of k, nil if there is none.
func (l *serviceLoads) find(k loadKey) *serviceLoad {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.loads[k]
}

// make returns the load of k, which it makes if there is none.
func (l *serviceLoads) make(k loadKey) *serviceLoad {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s := l.loads[k]; s != nil {
		return s
	}
	if l.loads == nil {
		l.loads = make(map[loadKey]*serviceLoad)
	}
	if len(l.loads) >= max(l.forgetAt, minLoads) {
		l.forget()
		l.forgetAt = 2 * len(l.loads)
	}
	s := &serviceLoad{key: k}
	if k.backend != "" {
		of := loadKey{route: k.backend}
		if s.backend = l.loads[of]; s.backend == nil {
			s.backend = &serviceLoad{key: of}
			l.loads[of] = s.backend
		}
	}
	l.loads[k] = s
	return s
}

// forget drops the loads that count nothing. A backend stays as long as a load that has
// it. The caller holds mu.
func (l *serviceLoads) forget() {
	used := make(map[*serviceLoad]bool)
	now := poll.Clock()
	for _, backends := range []bool{false, true} {
		for k, s := range l.loads {
			if backends != (s.backend == nil) || used[s] {
				continue
			}
			full := s.full.Load()
			if (full == 0 || full <= now) && s.connections.CompareAndSwap(0, forgottenLoad) {
				delete(l.loads, k)
			} else if s.backend != nil {
				used[s.backend] = true
			}
		}
	}
}

// opened counts a tunnel that is open; closed takes it back.
func (l *serviceLoads) opened(s *serviceLoad) {
	l.all.Add(1)
	s.open.Add(1)
}

func (l *serviceLoads) closed(s *serviceLoad) {
	s.open.Add(-1)
	l.all.Add(-1)
}

// byService returns the number of open tunnels of each service that has some.
func (l *serviceLoads) byService() map[string]int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	open := make(map[string]int)
	for k, s := range l.loads {
		if n := s.open.Load(); n > 0 {
			open[k.route] += int(n)
		}
	}
	return open
}

// A ServiceKey names a service as a Route does. Backend is empty where it is Service.
type ServiceKey struct{ Service, Backend string }

// OpenServices returns which services have tunnels or sessions that have not ended.
func (r *Relay) OpenServices() (open []ServiceKey) {
	l := &r.loads
	l.mu.RLock()
	defer l.mu.RUnlock()
	for k, s := range l.loads {
		if s.open.Load() > 0 {
			open = append(open, ServiceKey{k.route, k.backend})
		}
	}
	return open
}

// loadKey names what the requests of r are counted for.
func (r *Route) loadKey() loadKey {
	k := loadKey{r.Service, r.Backend}
	if k.backend == k.route {
		k.backend = ""
	}
	return k
}
