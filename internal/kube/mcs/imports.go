package mcs

import (
	"net/netip"
	"reflect"
	"slices"

	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

// An Address is where the pods of a cluster reach an import.
type Address struct {
	Service string       // "NAMESPACE/NAME" of the Service that has the ClusterIPs; "" for none
	IPs     []netip.Addr // its ClusterIPs
	Why     string       // there is none
}

// An Imported is a ServiceImport at an address.
type Imported struct {
	Ports []mcsv1.ServicePort

	// ClusterIPs are those that the import says, if they are a Service's.
	ClusterIPs []netip.Addr
}

// newImports returns the imports of the own cluster, if they are known and OnImports has not been
// called with them. mu is held.
//
// They are what the objects say, and not what is exported now: an import stays while it is in doubt
// whether it is exported, and it is there only where its namespace is.
func (c *Controller) newImports() map[Name]Imported {
	m := c.members[c.Cluster]
	if c.OnImports == nil || m == nil || !m.listed() {
		return nil
	}
	now := make(map[Name]Imported, len(m.imports))
	for name, i := range m.imports {
		if i.Labels[LabelManagedBy] != ManagedBy || i.DeletionTimestamp != nil || i.Spec.Type != mcsv1.ClusterSetIP {
			continue
		}
		one := Imported{Ports: i.Spec.Ports}
		if i.Annotations[NoteService] != "" {
			for _, text := range i.Spec.IPs {
				if a, err := netip.ParseAddr(text); err == nil {
					one.ClusterIPs = append(one.ClusterIPs, a)
				}
			}
		}
		now[name] = one
	}
	if c.imported != nil && reflect.DeepEqual(now, c.imported) {
		return nil
	}
	c.imported = now
	return now
}

// localize gives want the address that it has in the own cluster, and returns the Service that has
// it, "" for none. While that is not known the import keeps what it has.
func (c *Controller) localize(want *Import, name Name, have *mcsv1.ServiceImport) (service string) {
	if c.Address == nil || want.Spec.Type != mcsv1.ClusterSetIP {
		return ""
	}
	a, known := c.Address(name)
	switch {
	case !known && have != nil && have.Spec.Type == mcsv1.ClusterSetIP:
		want.Spec.IPs, want.Spec.IPFamilies = slices.Clone(have.Spec.IPs), slices.Clone(have.Spec.IPFamilies)
		service = have.Annotations[NoteService]
	case !known:
		want.Spec.IPs, want.Spec.IPFamilies = nil, nil
	case len(a.IPs) > 0:
		want.Spec.IPs, want.Spec.IPFamilies = nil, nil
		for _, ip := range a.IPs[:min(len(a.IPs), 2)] {
			want.Spec.IPs = append(want.Spec.IPs, ip.String())
			want.Spec.IPFamilies = append(want.Spec.IPFamilies, family(ip))
		}
		service = a.Service
	}
	want.Ready = importReady(&want.Spec)
	if len(want.Spec.IPs) == 0 && a.Why != "" {
		want.Ready.Message = "it has no address in the cluster set; the name leads to gateways: " + a.Why
	}
	return service
}

// annotated reports whether an import has those annotations; one that is empty is to be absent.
func annotated(i *mcsv1.ServiceImport, notes map[string]string) bool {
	for key, value := range notes {
		if have, there := i.Annotations[key]; have != value || there != (value != "") {
			return false
		}
	}
	return true
}

func annotate(i *mcsv1.ServiceImport, notes map[string]string) {
	if i.Annotations == nil {
		i.Annotations = map[string]string{}
	}
	for key, value := range notes {
		if i.Annotations[key] = value; value == "" {
			delete(i.Annotations, key)
		}
	}
}
