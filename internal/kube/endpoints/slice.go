package endpoints

import (
	"cmp"
	"fmt"
	"net/netip"
	"reflect"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"culvert.dev/tunnel"
)

// An Owner is what EndpointSlices belong to: a Service, or a ServiceImport.
type Owner struct {
	types.NamespacedName
	Import bool // it is a ServiceImport
}

// OfService returns the Owner that is a Service.
func OfService(namespace, name string) Owner {
	return Owner{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}}
}

// OfImport returns the Owner that is a ServiceImport.
func OfImport(namespace, name string) Owner {
	return Owner{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}, Import: true}
}

// A Slice has the fields of an EndpointSlice that culvert uses. It is never changed, but replaced.
type Slice struct {
	Owners    []Owner // by its labels; one that has none is not kept
	Ports     []Port
	Endpoints []Endpoint

	// Skipped is the first of the endpoints, in the order of these texts, that culvert never dials,
	// with the reason; "" if there are none. Skips is how many there are.
	Skipped string
	Skips   int
}

// A Port is one port of a Slice.
type Port struct {
	Name     string
	Protocol corev1.Protocol
	Number   uint16 // 0 means the same as the Service's
}

// SliceOf returns the fields of s that culvert uses, or nil if s belongs to no Service and no
// ServiceImport.
func SliceOf(s *discoveryv1.EndpointSlice) *Slice {
	var owners []Owner
	if name := s.Labels[discoveryv1.LabelServiceName]; name != "" {
		owners = append(owners, OfService(s.Namespace, name))
	}
	if name := s.Labels[mcsv1.LabelServiceName]; name != "" {
		owners = append(owners, OfImport(s.Namespace, name))
	}
	if owners == nil {
		return nil
	}
	out := &Slice{Owners: owners, Ports: make([]Port, 0, len(s.Ports)), Endpoints: make([]Endpoint, 0, len(s.Endpoints))}
	for i := range s.Ports {
		p := &s.Ports[i]
		port := Port{Protocol: corev1.ProtocolTCP}
		if p.Name != nil {
			port.Name = Shared(*p.Name)
		}
		if p.Protocol != nil {
			port.Protocol = cmp.Or(corev1.Protocol(Shared(string(*p.Protocol))), corev1.ProtocolTCP)
		}
		if p.Port != nil {
			if *p.Port < 1 || *p.Port > 65535 {
				continue
			}
			port.Number = uint16(*p.Port)
		}
		out.Ports = append(out.Ports, port)
	}
	for i := range s.Endpoints {
		if why := skipped(s, &s.Endpoints[i]); why != "" {
			if out.Skips++; out.Skipped == "" || why < out.Skipped {
				out.Skipped = why
			}
		} else if e, ok := Of(&s.Endpoints[i]); ok {
			out.Endpoints = append(out.Endpoints, e)
		}
	}
	return out
}

// skipped returns why an endpoint is never used, whatever its state, or "". The owner of a namespace
// can write EndpointSlices, and a gateway reaches what the owner does not: itself, the metadata
// service of its host, and by name any host at all, as with an ExternalName (CVE-2021-25740).
func skipped(s *discoveryv1.EndpointSlice, e *discoveryv1.Endpoint) string {
	if len(e.Addresses) == 0 {
		return ""
	}
	why := ""
	if s.AddressType == discoveryv1.AddressTypeFQDN {
		why = "is a name, which culvert does not follow"
	} else if a, err := netip.ParseAddr(e.Addresses[0]); err != nil {
		why = "is no address"
	} else if kind, never := tunnel.Forbidden(a); never {
		why = "is never dialed: " + kind
	} else {
		return ""
	}
	return fmt.Sprintf("EndpointSlice %s: %q %s", s.Name, e.Addresses[0], why)
}

// equal reports whether two Slices are the same for those that use them.
func (s *Slice) equal(o *Slice) bool { return reflect.DeepEqual(s, o) }
