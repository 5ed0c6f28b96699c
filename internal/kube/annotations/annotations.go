// Package annotations reads the annotations of Services and Namespaces that apply to a Service
// however clients reach it: as a service that annotations expose, and as a backend of routes of
// Gateway API.
//
//	balancing, problems := annotations.ReadBalancing(service.Annotations, namespace.Annotations)
//	for _, p := range problems { ... }
//	balancing.Apply(to) // a *registry.Service
package annotations

import (
	"fmt"
	"strconv"
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// Prefix is that of all annotations and labels of culvert.
const Prefix = "culvert.dev/"

// The annotations of a Balancing, without Prefix.
const (
	LoadBalancing   = "load-balancing"
	Connections     = "limits-connections"
	NewPerSecond    = "limits-new-per-second"
	PerEndpoint     = "limits-connections-per-endpoint"
	OutlierEjection = "outlier-ejection"
)

// balancingKeys are in the order in which problems are reported.
var balancingKeys = [...]string{LoadBalancing, Connections, NewPerSecond, PerEndpoint, OutlierEjection}

// A Balancing says how connections are divided among the endpoints of a service, and how many it
// may have. The zero Balancing is that of a service without annotations. It is comparable.
type Balancing struct {
	LoadBalancing registry.LoadBalancing
	Limits        tunnel.ServiceLimits // zero for none
	Ejects        bool                 // endpoints that fail are ejected
	Ejection      registry.OutlierEjection
}

// Set sets what one annotation says; key is without Prefix. An error changes nothing.
func (b *Balancing) Set(key, value string) error {
	switch key {
	case LoadBalancing:
		l, err := registry.ParseLoadBalancing(value)
		if err != nil {
			return err
		}
		b.LoadBalancing = l
	case OutlierEjection:
		e, err := registry.ParseOutlierEjection(value)
		if err != nil {
			return err
		}
		b.Ejects, b.Ejection = true, *e
	case Connections:
		return parseLimit(value, &b.Limits.Connections)
	case NewPerSecond:
		return parseLimit(value, &b.Limits.NewPerSecond)
	case PerEndpoint:
		return parseLimit(value, &b.Limits.ConnectionsPerEndpoint)
	default:
		return fmt.Errorf("%q is not an annotation of load balancing", key)
	}
	return nil
}

// Apply sets the fields of a service that b is about.
func (b *Balancing) Apply(to *registry.Service) {
	to.LoadBalancing, to.Limits, to.OutlierEjection = b.LoadBalancing, nil, nil
	if b.Limits != (tunnel.ServiceLimits{}) {
		limits := b.Limits
		to.Limits = &limits
	}
	if b.Ejects {
		ejection := b.Ejection
		to.OutlierEjection = &ejection
	}
}

// A Problem is an annotation that is malformed.
type Problem struct {
	Key       string // without Prefix
	Value     string // clipped
	Namespace bool   // it is the Namespace's
	Err       error
}

// ReadBalancing returns the Balancing of a Service by its annotations and those of its Namespace,
// which hold where the Service has none of that key. Either map may be nil.
func ReadBalancing(service, namespace map[string]string) (b Balancing, problems []Problem) {
	if len(service) == 0 && len(namespace) == 0 {
		return b, nil
	}
	for _, key := range balancingKeys {
		value, ok := service[Prefix+key]
		inherited := false
		if !ok {
			value, inherited = namespace[Prefix+key]
		}
		if !ok && !inherited {
			continue
		}
		if err := b.Set(key, value); err != nil {
			problems = append(problems, Problem{Key: key, Value: Clip(value), Namespace: inherited, Err: err})
		}
	}
	return b, problems
}

// Keep returns those of an object's annotations that ReadBalancing and ReadIdentity read, for a cache
// that need not keep the others; nil if there are none.
func Keep(all map[string]string) (kept map[string]string) {
	for _, key := range append(balancingKeys[:], ForwardIdentity) {
		if value, ok := all[Prefix+key]; ok {
			if kept == nil {
				kept = make(map[string]string, 1)
			}
			kept[Prefix+key] = value
		}
	}
	return kept
}

// maxLimit is the highest limit that an annotation may set.
const maxLimit = 1_000_000

func parseLimit(v string, to *int) error {
	n, err := strconv.ParseUint(v, 10, 32)
	if err != nil || n < 1 || n > maxLimit {
		return fmt.Errorf("write a number from 1 to %d", maxLimit)
	}
	*to = int(n)
	return nil
}

// Clip shortens a text that is quoted.
func Clip(s string) string {
	const most = 128
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "..."
}
