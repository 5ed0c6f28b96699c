package mcs

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"culvert.dev/internal/kube/client"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	mcsv1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
)

// An import with this label is a gateway's, and the annotation says which one's: only
// that one writes it. An import of an older version has no annotation.
const (
	LabelManagedBy = "app.kubernetes.io/managed-by"
	ManagedBy      = "culvert"
	NoteWriter     = "culvert.dev/writer"

	// NoteService names the Service, NAMESPACE/NAME, the ClusterIPs of which an import has in its cluster.
	NoteService = "culvert.dev/imported-service"
)

// role is what this gateway may do with an import that exists.
type role int

const (
	leave  role = iota // it belongs to another controller, or to another gateway
	adopt              // it may become ours
	writes             // it is ours
)

// role returns what may be done with have, an import in the cluster m. want is what
// is exported under its name, nil for nothing.
//
// Gateways that know different clusters may want different imports in a cluster that
// both know. One of them writes each: the first, until another one knows all
// clusters that it names and more, or as many and the import is in its own cluster.
// Neither lets the first take it back, so that no two write in turn.
func (c *Controller) role(m *member, have *mcsv1.ServiceImport, want *Import, set *Set) role {
	if have.Labels[LabelManagedBy] != ManagedBy {
		return leave
	}
	writer := have.Annotations[NoteWriter]
	if writer == c.writer() {
		return writes
	}
	for _, s := range have.Status.Clusters {
		if _, known := set.Clusters[s.Cluster]; !known {
			return leave // and that one's export is not to be deleted
		}
	}
	switch {
	case writer == "":
		return adopt
	case want == nil || len(have.Status.Clusters) == 0:
		return leave
	}
	for _, s := range have.Status.Clusters {
		if !slices.Contains(want.Clusters, s.Cluster) {
			return leave
		}
	}
	if len(want.Clusters) > len(have.Status.Clusters) || m.name == c.Cluster && !c.isIn(writer, m.name) {
		return adopt
	}
	return leave
}

// writer is what this gateway is called at imports.
func (c *Controller) writer() string { return c.Cluster + "/" + c.ID }

// isIn reports whether a writer's own cluster is that one.
func (c *Controller) isIn(writer, cluster string) bool { return strings.HasPrefix(writer, cluster+"/") }

// writeTimeout is how long one write may take: a slow API server delays its own cluster, and not
// for ever.
const writeTimeout = 15 * time.Second

// A change is one write. Its object is a copy.
type change struct {
	*member
	verb     string
	resource string
	name     Name
	do       func(context.Context) error
}

// changes returns what is to be written in one cluster. Controller.mu is undecided.
func (c *Controller) changes(m *member, set *Set) (todo []change) {
	undecided := c.undecided(set)
	for _, name := range sorted(m.exports) {
		e := m.exports[name]
		if i := m.imports[name]; i != nil && i.Labels[LabelManagedBy] == ManagedBy && i.Annotations[NoteWriter] != "" {
			want, wanted := set.Imports[name]
			if c.role(m, i, pointer(want, wanted), set) == leave {
				continue // whoever writes the import knows what to say of its exports
			}
		}
		if next, ok := c.withConditions(m, e, set.Conditions[m.name][name]); ok && !undecided[name] {
			todo = append(todo, change{m, "update", "serviceexports/status", name, func(ctx context.Context) error {
				got, err := m.API.MulticlusterV1beta1().ServiceExports(name.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
				if err == nil {
					c.wrote(m, name, next)
					m.note(ctx, e, got)
				}
				return err
			}})
		}
	}
	for _, name := range sorted(set.Imports) {
		if !m.covers(name.Namespace) || undecided[name] {
			continue
		}
		want, have := set.Imports[name], m.imports[name]
		notes := map[string]string{NoteWriter: c.writer()}
		if m.name == c.Cluster {
			notes[NoteService] = c.localize(&want, name, have)
		}
		switch {
		case have == nil:
			next := &mcsv1.ServiceImport{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, Labels: map[string]string{LabelManagedBy: ManagedBy}}, Spec: want.Spec}
			annotate(next, notes)
			todo = append(todo, change{m, "create", "serviceimports", name, func(ctx context.Context) error {
				_, err := m.API.MulticlusterV1beta1().ServiceImports(name.Namespace).Create(ctx, next, metav1.CreateOptions{})
				return err // its status comes when we have seen it
			}})
		case have.DeletionTimestamp != nil: // it is made anew when it is gone
		case have.Labels[LabelManagedBy] != ManagedBy:
			if c.logged.New(m.name+" foreign "+name.String(), "foreign") {
				c.log.Warn("a ServiceImport of another owner has this name; leaving it unchanged", "cluster", m.name, "import", name.String())
			}
		case c.role(m, have, &want, set) == leave:
			if writer := have.Annotations[NoteWriter]; !reflect.DeepEqual(clusterNames(have), want.Clusters) && c.logged.New(m.name+" writer "+name.String(), writer) {
				c.log.Warn("another gateway writes this ServiceImport for other clusters; delete it if that gateway is gone",
					"cluster", m.name, "import", name.String(), "writer", writer, "clusters", clusterNames(have), "known", want.Clusters)
			}
		case !reflect.DeepEqual(have.Spec, want.Spec) || !annotated(have, notes):
			next := have.DeepCopy()
			next.Spec = want.Spec
			annotate(next, notes)
			todo = append(todo, change{m, "update", "serviceimports", name, func(ctx context.Context) error {
				_, err := m.API.MulticlusterV1beta1().ServiceImports(name.Namespace).Update(ctx, next, metav1.UpdateOptions{})
				return err
			}})
		default:
			next := have.DeepCopy()
			next.Status.EndpointSliceObjects = mcsv1.EndpointSliceObjectsAbsent
			next.Status.Clusters = nil
			for _, cluster := range want.Clusters {
				next.Status.Clusters = append(next.Status.Clusters, mcsv1.ClusterStatus{Cluster: cluster})
			}
			meta.SetStatusCondition(&next.Status.Conditions, observed(have.Generation, want.Ready)[0])
			if reflect.DeepEqual(next.Status, have.Status) {
				continue
			}
			todo = append(todo, change{m, "update", "serviceimports/status", name, func(ctx context.Context) error {
				_, err := m.API.MulticlusterV1beta1().ServiceImports(name.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
				return err
			}})
		}
	}
	for _, name := range sorted(m.imports) {
		have := m.imports[name]
		if _, wanted := set.Imports[name]; wanted || undecided[name] || have.DeletionTimestamp != nil || c.role(m, have, nil, set) == leave {
			continue
		}
		uid, version := have.UID, have.ResourceVersion
		todo = append(todo, change{m, "delete", "serviceimports", name, func(ctx context.Context) error {
			err := m.API.MulticlusterV1beta1().ServiceImports(name.Namespace).Delete(ctx, name.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid, ResourceVersion: &version}})
			if apierrors.IsNotFound(err) {
				return nil
			}
			return err
		}})
	}
	return todo
}

// wrote notes which messages stand at an export by our hand.
func (c *Controller) wrote(m *member, name Name, e *mcsv1.ServiceExport) {
	words := map[string]string{}
	for _, cond := range e.Status.Conditions {
		words[cond.Type] = cond.Message
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.writtenMessages == nil {
		m.writtenMessages = map[Name]map[string]string{}
	}
	m.writtenMessages[name] = words
	for name := range m.writtenMessages {
		if m.exports[name] == nil {
			delete(m.writtenMessages, name)
		}
	}
}

func pointer[T any](v T, ok bool) *T {
	if !ok {
		return nil
	}
	return &v
}

func clusterNames(i *mcsv1.ServiceImport) (names []string) {
	for _, s := range i.Status.Clusters {
		names = append(names, s.Cluster)
	}
	slices.Sort(names)
	return names
}

// undecided returns the services in which a cluster takes part that has not been seen
// yet: what is said of them now may be wrong.
func (c *Controller) undecided(set *Set) map[Name]bool {
	undecided := map[Name]bool{}
	for _, m := range c.members {
		for name, i := range m.imports {
			if i.Labels[LabelManagedBy] == ManagedBy && slices.ContainsFunc(i.Status.Clusters, func(s mcsv1.ClusterStatus) bool {
				seen, there := set.Clusters[s.Cluster]
				return there && !seen
			}) {
				undecided[name] = true
			}
		}
	}
	return undecided
}

func (m *member) covers(namespace string) bool {
	return len(m.Namespaces) == 0 || slices.Contains(m.Namespaces, namespace)
}

func sorted[T any](m map[Name]T) []Name {
	return slices.SortedFunc(maps.Keys(m), func(a, b Name) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
}

// withConditions returns a copy of e with those conditions, and whether that
// makes a difference. Conditions of others stay. One that conflicts no longer, as
// it takes no part, says nothing of conflicts. A message alone is no difference, once
// it was written: another gateway may have other words for the same.
func (c *Controller) withConditions(m *member, e *mcsv1.ServiceExport, want []metav1.Condition) (*mcsv1.ServiceExport, bool) {
	if want == nil {
		return nil, false
	}
	next := e.DeepCopy()
	changed := false
	for _, w := range want {
		if have := meta.FindStatusCondition(e.Status.Conditions, w.Type); have != nil && have.Message != w.Message && m.writtenMessages[nameOf(e)][w.Type] == w.Message {
			w.Message = have.Message
		}
		changed = meta.SetStatusCondition(&next.Status.Conditions, w) || changed
	}
	conflict := string(mcsv1.ServiceExportConditionConflict)
	if !slices.ContainsFunc(want, func(c metav1.Condition) bool { return c.Type == conflict }) {
		changed = meta.RemoveStatusCondition(&next.Status.Conditions, conflict) || changed
	}
	return next, changed
}

// write makes all changes, and reports whether that worked.
func (c *Controller) write(ctx context.Context, todo []change) bool {
	byMember := map[*member][]change{}
	for _, ch := range todo {
		byMember[ch.member] = append(byMember[ch.member], ch)
	}
	var mu sync.Mutex
	all := true
	var running sync.WaitGroup
	for _, list := range byMember {
		running.Go(func() {
			for _, ch := range list {
				if !c.writeOne(ctx, ch) {
					mu.Lock()
					all = false
					mu.Unlock()
				}
			}
		})
	}
	running.Wait()
	return all
}

func (c *Controller) writeOne(ctx context.Context, ch change) bool {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	err := ch.do(ctx)
	subject := fmt.Sprintf("%s %s %s %s", ch.member.name, ch.verb, ch.resource, ch.name)
	switch {
	case err == nil:
		c.logged.New(subject, "")
		return true
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), ctx.Err() != nil:
		return false // another writer was faster, and we shall see the result
	case ch.verb == "create" && missingNamespace(err):
		c.mu.Lock()
		c.namespaceMissing = true // so it is not imported there; no watch reports when that changes
		c.mu.Unlock()
		return true
	}
	text := err.Error()
	if denied, ok := client.Denied(ch.verb, groupResource(ch.resource), err); ok {
		text = denied
	}
	if c.logged.New(subject, text) {
		c.log.Error("cannot write to a cluster of the cluster set", "cluster", ch.member.name, "verb", ch.verb, "resource", ch.resource, "object", ch.name.String(), "reason", text)
	}
	return false
}

// missingNamespace reports whether there is no such namespace, or one that is
// being deleted.
func missingNamespace(err error) bool {
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return true
	}
	s, ok := err.(apierrors.APIStatus)
	return ok && apierrors.IsNotFound(err) && s.Status().Details != nil && s.Status().Details.Kind == "namespaces"
}
