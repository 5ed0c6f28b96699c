package tunnel

import (
	"maps"
	"sync"
	"sync/atomic"
)

// openTunnels counts the tunnels that have not ended, all of them and those of each
// service.
type openTunnels struct {
	all atomic.Int64

	mu       sync.Mutex // guards services
	services map[string]int
}

func (o *openTunnels) add(service string) {
	o.all.Add(1)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.services == nil {
		o.services = make(map[string]int)
	}
	o.services[service]++
}

func (o *openTunnels) remove(service string) {
	o.mu.Lock()
	if o.services[service]--; o.services[service] == 0 {
		delete(o.services, service)
	}
	o.mu.Unlock()
	o.all.Add(-1)
}

// OpenByService returns the number of tunnels that have not ended of each service
// that has some. Tunnels without a service are those of "".
func (r *Relay) OpenByService() map[string]int {
	r.open.mu.Lock()
	defer r.open.mu.Unlock()
	return maps.Clone(r.open.services)
}

// ServiceBytes is what open tunnels of one service have carried.
type ServiceBytes struct {
	In  int64 // from clients to the service
	Out int64 // from the service to clients
}

// BytesByService returns what the open tunnels of each service have carried so far.
// A tunnel is left out from the moment before its Outcome is reported. It takes time
// with the number of tunnels and holds up none of them.
func (r *Relay) BytesByService() map[string]ServiceBytes {
	services := make(map[string]ServiceBytes)
	for _, t := range r.all() {
		if p, open := t.Progress(); open {
			name := infoOf(t).serviceName()
			sum := services[name]
			sum.In += p.In
			sum.Out += p.Out
			services[name] = sum
		}
	}
	return services
}
