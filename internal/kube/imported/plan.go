package imported

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"culvert.dev/internal/kube/client"
	"culvert.dev/registry/alloc"
)

// What a Service of an import has.
const (
	labelManagedBy = "app.kubernetes.io/managed-by"
	managedBy      = "culvert"
	labelOwner     = "culvert.dev/imported-by" // the Owner
	noteImport     = "culvert.dev/import"      // NAMESPACE/NAME of the ServiceImport
)

// maxLabel is the greatest length of a label's value, and of a Service's name.
const maxLabel = 63

// labels are those by which a Service is ours.
func (s *Source) labels() map[string]string {
	owner := s.Owner
	if len(owner) > maxLabel {
		owner = shortened(owner, owner)
	}
	return map[string]string{labelManagedBy: managedBy, labelOwner: owner}
}

// shortened returns text with a hash of of behind it, in the length of a label.
func shortened(text, of string) string {
	h := sha256.Sum256([]byte(of))
	text = text[:min(len(text), maxLabel-11)]
	return strings.TrimRight(text, "-.") + "-" + hex.EncodeToString(h[:5])
}

// serviceName returns the name of the Service of an import: the same one at all times.
func (s *Source) serviceName(name Name) string {
	return shortened("imported-"+name.Name+"-"+name.Namespace, s.Owner+" "+name.String())
}

// importOf returns which import a Service is of.
func importOf(svc *corev1.Service) (Name, bool) {
	namespace, name, ok := strings.Cut(svc.Annotations[noteImport], "/")
	return Name{Namespace: namespace, Name: name}, ok
}

// tcpPorts returns those of an import that are of TCP, by number.
func tcpPorts(ports []mcsv1.ServicePort) map[uint16]mcsv1.ServicePort {
	out := map[uint16]mcsv1.ServicePort{}
	for _, p := range ports {
		if n := uint16(p.Port); cmp.Or(p.Protocol, corev1.ProtocolTCP) == corev1.ProtocolTCP && p.Port > 0 && p.Port <= 65535 && out[n].Port == 0 {
			out[n] = p
		}
	}
	return out
}

// A verb is what is done to a Service.
type verb string

const (
	creates verb = "create"
	updates verb = "update"
	deletes verb = "delete"
)

// A change is one write.
type change struct {
	verb    verb
	name    Name // of the import
	service *corev1.Service
}

// plan returns what is to be written, and which imports do not get all that they need. It keeps
// which target ports are free, and not to be given to others yet. mu is held.
func (s *Source) plan(now time.Time) (todo []change, failed map[Name]string) {
	failed = map[Name]string{}
	var keys []alloc.PortKey
	for name, ports := range s.imports {
		for n := range tcpPorts(ports) {
			keys = append(keys, alloc.PortKey{Protocol: "tcp", Service: name.String(), Port: n})
		}
	}
	p := alloc.PortPlan{Range: s.Ports, ReuseAfter: reuseAfter, Now: now}
	next, without := p.Assign(keys, s.assigned(now))
	s.gone = nil
	targets := map[Name]map[uint16]uint16{}
	for _, a := range next {
		if !a.Gone.IsZero() {
			s.gone = append(s.gone, a)
			continue
		}
		namespace, name, _ := strings.Cut(a.Service, "/")
		n := Name{Namespace: namespace, Name: name}
		if targets[n] == nil {
			targets[n] = map[uint16]uint16{}
		}
		targets[n][a.Port] = a.Assigned
	}
	for _, f := range without {
		namespace, name, _ := strings.Cut(f.Service, "/")
		n := Name{Namespace: namespace, Name: name}
		if failed[n] == "" {
			failed[n] = fmt.Sprintf("port %d: %v: make the range of kubernetes.importedServices larger", f.Port, f.Err)
		}
	}
	wanted := map[string]bool{}
	for _, name := range slices.SortedFunc(maps.Keys(targets), compareNames) {
		want := s.desired(name, targets[name])
		wanted[want.Name] = true
		have := s.services[want.Name]
		switch {
		case have == nil:
			if at, ok := s.created[want.Name]; ok && now.Sub(at) < retryInterval {
				continue // it has not been seen yet
			}
			todo = append(todo, change{creates, name, want})
		case have.DeletionTimestamp != nil: // it is made anew when it is gone
		default:
			if next := changed(have, want); next != nil {
				todo = append(todo, change{updates, name, next})
			}
		}
	}
	for _, svc := range slices.Sorted(maps.Keys(s.services)) {
		if have := s.services[svc]; !wanted[svc] && have.DeletionTimestamp == nil {
			name, _ := importOf(have)
			todo = append(todo, change{deletes, name, have})
		}
	}
	// What is deleted leaves ports for what is created: they are held, so the order does not matter.
	return todo, failed
}

// assigned returns the target ports of the Services, and those that are free again since a while.
func (s *Source) assigned(now time.Time) (all []alloc.Port) {
	taken := map[uint16]bool{}
	have := map[alloc.PortKey]bool{}
	for _, p := range s.open() {
		key := alloc.PortKey{Protocol: "tcp", Service: p.to.String(), Port: p.port}
		if taken[p.target] || have[key] { // somebody has changed a Service
			continue
		}
		taken[p.target], have[key] = true, true
		all = append(all, alloc.Port{PortKey: key, Assigned: p.target, Since: now})
	}
	for _, a := range s.gone {
		if !taken[a.Assigned] && !have[a.PortKey] {
			all = append(all, a)
		}
	}
	return all
}

// desired returns the Service of an import whose ports have those target ports.
func (s *Source) desired(name Name, targets map[uint16]uint16) *corev1.Service {
	policy := corev1.IPFamilyPolicyPreferDualStack
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Namespace, Name: s.serviceName(name), Labels: s.labels(), Annotations: map[string]string{noteImport: name.String()},
		},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, IPFamilyPolicy: &policy, Selector: maps.Clone(s.Selector)},
	}
	ports := tcpPorts(s.imports[name])
	for _, n := range slices.Sorted(maps.Keys(targets)) {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{
			Name: fmt.Sprintf("tcp-%d", n), Protocol: corev1.ProtocolTCP, Port: int32(n), TargetPort: intstr.FromInt32(int32(targets[n])),
			AppProtocol: ports[n].AppProtocol,
		})
	}
	return svc
}

// changed returns have as want has it, or nil if it is so. What others have added stays.
func changed(have, want *corev1.Service) *corev1.Service {
	next := have.DeepCopy()
	if next.Annotations == nil {
		next.Annotations = map[string]string{}
	}
	maps.Copy(next.Annotations, want.Annotations)
	next.Spec.Type, next.Spec.Selector, next.Spec.Ports = want.Spec.Type, want.Spec.Selector, want.Spec.Ports
	next.Spec.ExternalIPs, next.Spec.PublishNotReadyAddresses = nil, false
	if reflect.DeepEqual(next, have) {
		return nil
	}
	return next
}

// write makes one change, and returns why it failed; "" where it did not, or where what another
// replica has written will be seen.
func (s *Source) write(ctx context.Context, ch change) string {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	services, svc := s.Client.CoreV1().Services(s.Namespace), ch.service
	var err error
	switch ch.verb {
	case creates:
		if _, err = services.Create(ctx, svc, metav1.CreateOptions{}); err == nil {
			s.mu.Lock()
			if s.services[svc.Name] == nil {
				s.created[svc.Name] = time.Now()
			}
			s.mu.Unlock()
			s.log.Info("imported service has an address in this cluster", "import", ch.name.String(), "service", svc.Namespace+"/"+svc.Name)
			return ""
		}
		if apierrors.IsAlreadyExists(err) {
			have, getErr := services.Get(ctx, svc.Name, metav1.GetOptions{})
			if getErr == nil && have.Labels[labelManagedBy] == managedBy && have.Labels[labelOwner] == svc.Labels[labelOwner] {
				return ""
			}
			return fmt.Sprintf("the Service %s/%s is of another owner: delete or rename it", svc.Namespace, svc.Name)
		}
	case updates:
		_, err = services.Update(ctx, svc, metav1.UpdateOptions{})
	case deletes:
		uid := svc.UID
		if err = services.Delete(ctx, svc.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}); apierrors.IsNotFound(err) {
			err = nil
		}
	}
	text := ""
	switch {
	case err == nil, apierrors.IsConflict(err):
	default:
		text = fmt.Sprintf("%s of Service %s/%s failed: %v", ch.verb, svc.Namespace, svc.Name, err)
		if denied, ok := client.Denied(string(ch.verb), corev1.Resource("services"), err); ok {
			text = denied
		}
	}
	if ch.verb == deletes && s.logged.New("delete "+svc.Name, text) {
		s.log.Error("cannot delete the Service of an import that is gone", "service", svc.Namespace+"/"+svc.Name, "reason", text)
	}
	return text
}
