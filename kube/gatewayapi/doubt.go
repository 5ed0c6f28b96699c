package gatewayapi

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What is not known, and what is not believed: neither may empty a table.

// needed are the kinds that no table can be made without: if they were left out it
// would serve less than it should, or without the TLS that a policy asks for.
// Without Secrets, ConfigMaps and Namespaces only that is refused which needs one.
var needed = []string{
	"gatewayclasses", "gateways", "listenersets", "tlsroutes", "tcproutes", "udproutes",
	"referencegrants", "backendtlspolicies", "services", "endpointslices",
}

// forbidden says which of the needed kinds have never been read because they may
// not be: a start with a role that lacks something is none with less to serve. It
// is nil if each can be read in one of the namespaces at least, for who has a
// namespace can take away rights there, and that is no matter of the others.
func (s *store) forbidden() error {
	var all []string
	for _, resource := range needed {
		if sh := s.kinds[resource]; len(sh.unread()) == sh.wanted {
			all = append(all, *sh.denied[0].Load())
		}
	}
	switch n := len(all); {
	case n == 0:
		return nil
	case n > 3:
		all = append(all[:3], fmt.Sprintf("and %d more kinds may not be listed", n-3))
	}
	return errors.New(strings.Join(all, "; "))
}

// unread are the namespaces that are served, "" for all, whose objects have never
// been read because they may not be.
func (sh *shelf) unread() []string {
	var out []string
	for i, namespace := range sh.in[:sh.wanted] {
		if sh.denied[i].Load() != nil && !sh.informers[i].HasSynced() {
			out = append(out, namespace)
		}
	}
	return out
}

// emptied is nil if a translation may be believed that has just been made. It may
// not if there was nothing at all of a kind, where there was before, and the API
// server does not say the same when it is asked once more, past its cache: one
// that has lost its store, or finds it again, lists nothing for a moment. Kinds
// that the table was not made of are of no interest.
func (s *store) emptied(ctx context.Context) error {
	for _, sh := range s.order {
		if r := sh.resource.Resource; r == "httproutes" || r == "grpcroutes" {
			continue // nothing is served by them
		}
		for i, inf := range sh.informers {
			if !sh.had[i] || sh.found[i] || len(inf.GetStore().ListKeys()) > 0 {
				continue
			}
			if err := s.ask(ctx, sh, i); err != nil {
				return err
			}
		}
	}
	s.doubt = doubt{}
	for _, sh := range s.order {
		copy(sh.had, sh.found)
	}
	return nil
}

// A doubt is what is not believed, and asked for again.
type doubt struct {
	err   error
	pause time.Duration // that the next question waits for
	next  time.Time     // when that one is
}

// ask is nil if the API server says that there is nothing. Whoever makes changes
// meanwhile does not have it asked more often.
func (s *store) ask(ctx context.Context, sh *shelf, i int) error {
	d := &s.doubt
	if d.err != nil && time.Now().Before(d.next) {
		return d.err
	}
	if d.err = sh.any(ctx, i); d.err != nil {
		d.pause = min(max(2*d.pause, again), againMost)
		d.next = time.Now().Add(d.pause)
		time.AfterFunc(d.pause, s.dirty)
	}
	return d.err
}

// any is nil if the API server has nothing.
func (sh *shelf) any(ctx context.Context, i int) error {
	what := sh.resource.String()
	if sh.in[i] != metav1.NamespaceAll {
		what += " of namespace " + sh.in[i]
	}
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	o, err := sh.lists[i].ListWithContext(ctx, metav1.ListOptions{Limit: 1})
	switch {
	case apierrors.IsNotFound(err): // their CRD went, and they with it
		return nil
	case err != nil:
		return fmt.Errorf("all %s are gone, and it can't be found out whether they are: %w", what, err)
	case meta.LenList(o) > 0:
		return fmt.Errorf("all %s were gone, and the API server has some", what)
	}
	return nil
}
