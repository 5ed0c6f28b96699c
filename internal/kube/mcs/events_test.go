package mcs

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// events are those of a site, "shop/web NoService: ...".
func (s *site) events() (out []string) {
	s.t.Helper()
	l, err := s.core.CoreV1().Events("shop").List(s.t.Context(), metav1.ListOptions{})
	s.must(err)
	for _, e := range l.Items {
		o := e.InvolvedObject
		if o.Kind != "ServiceExport" || o.APIVersion != "multicluster.x-k8s.io/v1beta1" || e.Type != corev1.EventTypeWarning || e.ReportingController != controllerName {
			s.t.Errorf("got the event %+v", e)
		}
		out = append(out, o.Namespace+"/"+o.Name+" "+e.Message)
	}
	return out
}

// What is wrong with a ServiceExport is an Event in its cluster and a line of each
// replica's log, once.
func TestRefusedExportsAreSaid(t *testing.T) {
	for _, tt := range []struct {
		name   string
		set    func(w *world, east, west *site)
		reason string
		alone  bool // there is no such Event in west
	}{
		{"no Service", func(_ *world, east, _ *site) {
			east.export(web, 0)
			east.must(east.core.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("services"), "shop", "web"))
		}, "NoService: there is no Service", true},
		{"an ExternalName", func(_ *world, east, _ *site) {
			east.export(web, 0, func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeExternalName })
		}, "InvalidServiceType: ", true},
		{"denied by an administrator", func(w *world, east, _ *site) {
			east.export(web, 0)
			w.c.Refuses = func(string, string) string { return "deny says so" }
		}, "Failed: deny says so", true},
		{"a conflict", func(_ *world, east, west *site) {
			east.export(web, 0)
			west.export(web, 1, func(s *corev1.Service) { s.Spec.ClusterIP = "None" })
		}, "TypeConflict: ", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				east, west := newSite(t), newSite(t)
				tt.set(w, east, west)
				w.add("east", east)
				w.add("west", west)
				w.settle()
				time.Sleep(time.Hour)
				synctest.Wait()
				if es := east.events(); len(es) != 1 || !strings.HasPrefix(es[0], "shop/web "+tt.reason) {
					t.Errorf("got events %q, want one with %q", es, tt.reason)
				}
				if es := west.events(); (len(es) == 0) != tt.alone {
					t.Errorf("got events %q in west", es)
				}
				line := `msg="Kubernetes object refused" cluster=east object="ServiceExport shop/web" why="` + tt.reason
				if n := strings.Count(w.log.String(), line); n != 1 {
					t.Errorf("got %d lines, want one with %s:\n%s", n, line, &w.log)
				}
			})
		})
	}
}

func TestRefusedExportsAreSaidByAllAndNotByTheThousand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.leads = false
		east := newSite(t)
		for i := range 100 {
			east.export(Name{Namespace: "shop", Name: fmt.Sprint("web-", i)}, 0, func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeExternalName })
		}
		east.setFail(func(verb, resource string) error {
			if verb == "create" && resource == "events" {
				return apierrors.NewForbidden(corev1.Resource("events"), "", nil)
			}
			return nil
		})
		w.add("east", east)
		w.settle()
		if n := strings.Count(w.log.String(), "Kubernetes object refused\" cluster"); n != maxLogLines || !strings.Contains(w.log.String(), "suppressed=68") {
			t.Errorf("got %d lines:\n%s", n, &w.log)
		}
		w.locked(func() { w.leads = true })
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := strings.Count(w.log.String(), "may not create events"); n != 1 {
			t.Errorf("got %d lines of the missing right, want one:\n%s", n, &w.log)
		}
	})
}
